"""Generation: vLLM in the rank's process.

    requests ─> collect.py ─> vllm_engine.py ─> a token of every sequence at a time
                   │  ^
                   │  └── tools.py: what tools answered, in processes beside the engine
                   └────> finished responses, to the reward workers at once

In: ``Request``; out: ``Completion`` with tokens, log-probs and, where asked for, routed experts. All ranks of an engine
run ``collect.py`` alike; the first one alone has reward workers and tools, and passes on what tools answered.

Random numbers follow from a request's seed and a token's position (``token_seeds.py``), not from engine, batch, chunked
prefill or preemption. vLLM's V2 runner samples so itself; for V1 both workers, ``vllm_cpu.py`` and ``vllm_gpu.py``,
reseed before each token.

Weights are written into vLLM's own parameters between ``open_weights`` and ``close_weights``. On a GPU no address
changes, because CUDA graphs hold them; on a CPU ``cpu_weights.py`` unpacks vLLM's kernels' form layer by layer and
packs it anew. A vLLM that shards or names a weight otherwise than ``sharding.engine_shards`` is refused at startup.
Waking, an engine takes its weights first and the cache after, each time after PyTorch's cache was emptied;
``vllm_memory.py`` has what engine and trainer share of a GPU.
"""
