"""What some variants need beyond samples, rewards and log-probs, and other ways to draw samples.

Needs: a critic, a teacher, the influence of tokens, true answers, weights against displacement. Ways to draw: ahead of
the step, partial rollouts, by a plan, with greedy completions, by level.
"""

from grpojax.extension import Names

NAMES = Names(
    commands={"displacement": "grpojax.extensions.methods.cli.displacement"},
    sections={
        "critic": "grpojax.extensions.methods.method_sections:CriticConfig",
        "rollout.curriculum": "grpojax.extensions.methods.method_sections:CurriculumConfig",
        "rollout.sample_allocation": "grpojax.extensions.methods.method_sections:AllocationConfig",
    },
    needs={
        "critic": "grpojax.extensions.methods.critic:LearnedCritic",
        "displacement_weights": "grpojax.extensions.methods.displacement:Displacement",
        "greedy": "grpojax.extensions.methods.greedy:Greedy",
        "ground_truth": "grpojax.extensions.methods.true_answers:TrueAnswers",
        "hidden_states": "grpojax.extensions.methods.influence:TokenInfluence",
        "proxy": "grpojax.extensions.methods.proxy:Proxy",
        "rollout_plan": "grpojax.extensions.methods.allocated:Allocation",
        "teacher": "grpojax.extensions.methods.teacher:Teacher",
    },
    settings={
        "rollout.curriculum": "grpojax.extensions.methods.levels:ByLevel",
        "rollout.ahead": "grpojax.extensions.methods.ahead:DrawsAhead",
        "rollout.overlap": "grpojax.extensions.methods.partial:DrawsPartially",
    },
    exclusions="grpojax.extensions.methods.exclusions:TABLE",
)
