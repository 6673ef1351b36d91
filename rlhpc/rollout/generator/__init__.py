"""Engines on ranks of their own: generate beside the trainers, from version to version.

An engine asks its schedule (``rlhpc.rollout.schedule``) what it does next, in virtual time: admit a group, make an
engine step, take a tool's answer, switch to a version. ``loop`` does it, ``delivery`` turns finished responses into
groups and passes them to the trainers, ``state`` is an engine's part of a checkpoint, ``messages`` what both sides
exchange.
"""
