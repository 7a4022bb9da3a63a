"""Rewards of a few completions in one call."""

from grpojax.rewards import RewardConfig, Rewards


def score(config, completions, gold=None, tokens=None, group=1, **columns):
    columns = columns | ({} if gold is None else {"gold": gold})
    with Rewards(config) as scorer:
        return scorer([""] * len(completions), completions, tokens or [[]] * len(completions), columns, group=group)


def one(name, completions, gold=None, tokens=None, **options):
    return score([RewardConfig(name=name, options=options)], completions, gold, tokens).total.tolist()
