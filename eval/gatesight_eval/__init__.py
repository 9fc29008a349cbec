"""Eviction methods measured on the same items, with the same budgets and the same code."""
