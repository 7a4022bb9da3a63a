"""Problems from files and hubs to padded prompt batches."""

from grpojax.data.batches import Batches, Pass, RetiringBatches, in_order, to_prompts
from grpojax.data.chat_template import writes_day
from grpojax.data.chats import Question, chat_in
from grpojax.data.columns import find_columns
from grpojax.data.golds import read_gold
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
    "Batches",
    "DataConfig",
    "Example",
    "Known",
    "Pass",
    "Problem",
    "Problems",
    "Question",
    "RetiringBatches",
    "SourceConfig",
    "Tokenize",
    "chat_in",
    "chat_of",
    "find_columns",
    "in_order",
    "load_problems",
    "locate",
    "numbered",
    "read_gold",
    "read_questions",
    "sources",
    "to_prompts",
    "writes_day",
]
