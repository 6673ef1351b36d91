"""Engines on ranks of their own: generate beside the trainers, from version to version.

An engine asks its schedule (``rlhpc.rollout.schedule``) what it does next, in virtual time: admit a group, make an
engine step, take a tool's answer, lend requests and take them back, switch to a version.

    loop.py       what all ranks of an engine do
    lead.py       what its first rank does beside: decide, judge, deliver, save
    responses.py  groups and held-out prompts as requests
    ordered.py    which of them run while more wait than run
    shelf.py      groups until the trainers have consumed them
    state.py      an engine's part of a checkpoint
    lending.py    requests that engines on trainers' ranks continue
    messages.py   what engines and trainers exchange
    parts.py      what the composition root gives them
"""
