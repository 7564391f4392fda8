"""Hypothesis settings of these tests."""

from hypothesis import settings

# A busy machine may take long over any example; the drawn ones are the same on every run.
settings.register_profile("algorithms", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("algorithms")
