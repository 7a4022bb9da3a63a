"""Problems from files and hubs to padded prompt batches."""

from grpojax.data.batches import Batches, Pass, RetiringBatches, in_order, to_prompts
from grpojax.data.problems import DataConfig, Example, Problem, Problems, gold_answer, load_problems, read_rows
from grpojax.data.readers import BUILTIN, SourceConfig, locate
from grpojax.data.tokenizing import Tokenize

__all__ = [
    "BUILTIN",
    "Batches",
    "DataConfig",
    "Example",
    "Pass",
    "Problem",
    "Problems",
    "RetiringBatches",
    "SourceConfig",
    "Tokenize",
    "gold_answer",
    "in_order",
    "load_problems",
    "locate",
    "read_rows",
    "to_prompts",
]
