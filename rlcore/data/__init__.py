"""Prompts: read from files, named, and handed out in a seeded order. Imports no torch."""

from rlcore.data.dataset import Dataset, DatasetInfo, check_dataset, load_dataset
from rlcore.data.order import Order
from rlcore.data.prompts import Prompt
from rlcore.data.source import Cursor, Place, places, plan, position_at, span

__all__ = [
    "Cursor",
    "Dataset",
    "DatasetInfo",
    "Order",
    "Place",
    "Prompt",
    "check_dataset",
    "load_dataset",
    "places",
    "plan",
    "position_at",
    "span",
]
