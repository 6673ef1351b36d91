"""Whole RL steps of the real trainer, in float64, against a reference that is written out token by token.

``script.py`` draws a run from a seed: its configuration, the turns of every response, its rewards. ``model.py`` has
what replaces Megatron and vLLM at their interfaces: a table of logits, trained by autograd, and an engine that follows
the script. ``drive.py`` runs ``rlhpc.trainer.step:rl_step`` with them on two ranks. ``reference.py`` and its parts
compute the same run again with plain loops and none of rlhpc's mathematics; ``compare.py`` compares.

    python -m tests.float64 [COUNT]    compares COUNT seeds and prints a summary in Markdown
"""
