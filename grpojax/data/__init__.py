"""Problems from files and hubs to padded prompt batches."""

from grpojax.data.answered import Answered, AnsweredConfig, Answers, load_answered, read_answer, read_pair
from grpojax.data.batches import Batches, Pass, RetiringBatches, in_order, to_prompts
from grpojax.data.chat_template import writes_day
from grpojax.data.chats import Question, chat_in
from grpojax.data.columns import find_columns
from grpojax.data.exemplars import Exemplars
from grpojax.data.golds import read_gold
from grpojax.data.levels import Level, LevelBatches, check_levels, shares
from grpojax.data.problems import (
    PARTS,
    DataConfig,
    Example,
    Known,
    Problem,
    Problems,
    load_problems,
    numbered,
    read_questions,
    sources,
)
from grpojax.data.readers import BUILTIN, HUB, SourceConfig, locate
from grpojax.data.tokenizing import Tokenize, chat_of

__all__ = [
    "BUILTIN",
    "HUB",
    "PARTS",
    "Answered",
    "AnsweredConfig",
    "Answers",
    "Batches",
    "DataConfig",
    "Example",
    "Exemplars",
    "Known",
    "Level",
    "LevelBatches",
    "Pass",
    "Problem",
    "Problems",
    "Question",
    "RetiringBatches",
    "SourceConfig",
    "Tokenize",
    "chat_in",
    "chat_of",
    "check_levels",
    "find_columns",
    "in_order",
    "load_answered",
    "load_problems",
    "locate",
    "numbered",
    "read_answer",
    "read_gold",
    "read_pair",
    "read_questions",
    "shares",
    "sources",
    "to_prompts",
    "writes_day",
]
