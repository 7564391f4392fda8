"""Weights from one form of storage to another, a tensor at a time."""
