"""Schedule of a separate placement: which prompt starts on which engine, when, and with which weights.

Time is virtual: constants of the resolved config, in whole nanoseconds, never measured in the run. Two runs therefore
take the same actions in the same order, on slow and fast machines, resumed or not.

    terms.py            the constants
    engine_schedule.py  what one engine does next; news of the others
    knowledge.py        what an engine knows of all, and how early anything else can happen
    states.py           states to begin with, also with another number of engines
    batches.py          which groups form the batch of a step
    actions.py          the actions
    response_order.py   in which order responses run while more wait than run
    engine_order.py     the same for those of one engine
    generation_load.py  responses of a step and the time of engines for them
    simulator.py        step time and idle shares of schedules

The rule. Group j, the j-th prompt of the run's order, belongs to engine j mod E. Each engine has a clock V; a step of b
requests adds a + c b to it. Batch s has the s-th P groups, in order, that the filter keeps; its groups have all ended
at C_s, and version s + 1 is due at T_{s+1} = max(T_s, C_s) + d. Before a step, an engine

1. switches to the next version if it is due (with ``finish`` once its own requests have ended, starting none before),
2. takes the answers of tools that are due, V + tool_seconds after the call,
3. starts its next group while it has fewer requests than slots, if its version is at least the group's latest possible
   step minus max_staleness. Until it is known, at the end of a group plus d, that the filter drops it, it counts as
   kept: no token can be older than max_staleness.

Which of an engine's requests run, if they are more than its slots, follows from its own steps alone.

An engine without requests moves its clock to the next of these events. What it cannot know yet for its clock, it waits
for; the others' news bound what they can still do, and d > 0 and a + c > 0 keep any two from waiting for each other.
"""
