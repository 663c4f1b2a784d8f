"""Thin commands over the library; the only place that prints."""
