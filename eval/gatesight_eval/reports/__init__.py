"""Runs' folders, and what is made of them: means with intervals, tables, plots, Hub cards.

Lines of results come in; JSON, Markdown and figures go out. Imports `backends` for the names of rows.
"""
