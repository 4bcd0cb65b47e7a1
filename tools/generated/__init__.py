"""Markdown made from the code, for the pages of the site."""
