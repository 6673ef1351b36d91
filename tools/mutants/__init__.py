"""Mutated inputs: each case changes one thing in a working run and hands it to one command.

A case is drawn by a seed and a number alone, so that any one can be run again.
"""
