"""`dpopt report`: one HTML page of a suite that opens without a network."""

from dpopt.analysis.report.content import Part
from dpopt.analysis.report.page import page

__all__ = ["Part", "page"]
