"""Fixtures: small suites and stores."""

from small_suites import searched, store, write_searches, write_suite

__all__ = ["searched", "store", "write_searches", "write_suite"]
