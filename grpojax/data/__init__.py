"""Problems from files and hubs to padded prompt batches."""

from grpojax.data.answered import Answered, AnsweredConfig, Answers, load_answered, read_answer, read_pair
from grpojax.data.batches import Batches, Pass, RetiringBatches, in_order, to_prompts
from grpojax.data.exemplars import Exemplars
from grpojax.data.levels import Level, LevelBatches, check_levels, shares
from grpojax.data.problems import (
    DataConfig,
    Example,
    Problem,
    Problems,
    Question,
    gold_answer,
    load_problems,
    read_questions,
    read_rows,
    sources,
)
from grpojax.data.readers import BUILTIN, SourceConfig, locate
from grpojax.data.tokenizing import Tokenize, chat_of

__all__ = [
    "BUILTIN",
    "Answered",
    "AnsweredConfig",
    "Answers",
    "Batches",
    "DataConfig",
    "Example",
    "Exemplars",
    "Level",
    "LevelBatches",
    "Pass",
    "Problem",
    "Problems",
    "Question",
    "RetiringBatches",
    "SourceConfig",
    "Tokenize",
    "chat_of",
    "check_levels",
    "gold_answer",
    "in_order",
    "load_answered",
    "load_problems",
    "locate",
    "read_answer",
    "read_pair",
    "read_questions",
    "read_rows",
    "shares",
    "sources",
    "to_prompts",
]
