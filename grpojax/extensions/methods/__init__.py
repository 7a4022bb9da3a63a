"""What some variants need beyond samples, rewards and log-probs, and other ways to draw samples.

Needs: a critic, a teacher, the influence of tokens, true answers, weights against displacement. Ways to draw: ahead of
the step, partial rollouts, by a plan, with a greedy companion, by level.
"""

from grpojax.extension import Names

NAMES = Names(
    commands={"displacement": "grpojax.extensions.methods.cli.displacement"},
    sections={
        "critic": "grpojax.extensions.methods.sections:CriticConfig",
        "rollout.curriculum": "grpojax.extensions.methods.sections:CurriculumConfig",
        "rollout.sample_allocation": "grpojax.extensions.methods.sections:AllocationConfig",
    },
    needs={
        "critic": "grpojax.extensions.methods.critic:Critic",
        "displacement_weights": "grpojax.extensions.methods.displacement:Displacement",
        "ground_truth": "grpojax.extensions.methods.true_answers:TrueAnswers",
        "hidden_states": "grpojax.extensions.methods.influence:TokenInfluence",
        "teacher": "grpojax.extensions.methods.teacher:Teacher",
    },
    sources={
        "greedy": "grpojax.extensions.methods.greedy:Greedy",
        "rollout.ahead": "grpojax.extensions.methods.ahead:Ahead",
        "rollout.curriculum": "grpojax.extensions.methods.levels:LevelCurriculum",
        "rollout.overlap": "grpojax.extensions.methods.partial:Partial",
        "rollout_plan": "grpojax.extensions.methods.allocated:Allocated",
        "step_rewards": "grpojax.extensions.methods.step_rewards:read",
    },
    exclusions="grpojax.extensions.methods.exclusions:TABLE",
)
