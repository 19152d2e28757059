"""`dpopt report`: one HTML page of a suite that opens without a network."""

from dpopt.results.report.page import page

__all__ = ["page"]
