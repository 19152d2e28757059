"""Stored records -> frames -> tables. Never imports torch, so that reading results is quick."""
