"""Comparisons: trains mixers under one budget on the same data, and writes a report."""

from omniattn.compare.budget import BudgetError
from omniattn.compare.cells import FolderError
from omniattn.compare.comparison import DEFAULT_MODELS, run
from omniattn.compare.mixers import KINDS
from omniattn.compare.recall import (
    TASKS,
    AssociativeRecall,
    MultiHop,
    Needle,
    RecallTask,
    SelectiveCopy,
)
from omniattn.compare.report import Report, Table
from omniattn.compare.settings import BUDGETS, PARTS, Settings
from omniattn.functional._keywords import explain_keywords

__all__ = [
    "BUDGETS",
    "DEFAULT_MODELS",
    "KINDS",
    "PARTS",
    "TASKS",
    "AssociativeRecall",
    "BudgetError",
    "FolderError",
    "MultiHop",
    "Needle",
    "RecallTask",
    "Report",
    "SelectiveCopy",
    "Settings",
    "Table",
    "run",
]

explain_keywords(__name__, __all__)
