"""`dpopt report`: one HTML page of a suite that opens without a network."""

from dpopt.results.report.page import page, tables_of

__all__ = ["page", "tables_of"]
