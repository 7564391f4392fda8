"""Generation, scoring, filtering and evaluation. Imports neither torch nor ray.

This file imports nothing, since scorer processes load the package and must start at once.
"""
