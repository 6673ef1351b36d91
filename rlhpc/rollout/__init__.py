"""Generation: vLLM in the rank's process.

    requests ─> collect.py ─> vllm_engine.py ─> one token of every sequence at a time
                   │  ^
                   │  └── tools.py: answers of tools, which run in processes beside the engine
                   └────> finished responses, immediately to the reward workers

In: ``Request``; out: ``Completion`` with tokens, log-probs and, on request, routed experts. All ranks of an engine run
``collect.py``; only the first one has reward workers and tools, and it broadcasts the tools' answers.

Random numbers depend on a request's seed and a token's position (``token_seeds.py``), not on engine, batch, chunked
prefill or preemption. vLLM's V2 runner does this itself; for V1 both workers, ``vllm_cpu.py`` and ``vllm_gpu.py``,
seed each token: on a GPU by noise of the whole batch (``token_noise.py``), on a CPU by the requests' generators.
``speculation.py`` therefore knows which guessed tokens are right: those that are drawn at their positions.

Weights may also change while requests are in flight (``vllm_requests.py``), between two engine steps. ``preempt``
returns all requests to the queue, to be recomputed; otherwise they keep their KV cache, and a salt keeps other requests
from its prefixes. After ``preempt``, a fresh engine that gets the same requests in the same order continues bit for
bit. At such a switch, ``collect.py`` adds to each draft the tokens of the older version.

Weights are written into vLLM's own parameters between ``open_weights`` and ``close_weights``. On a GPU addresses never
change, because CUDA graphs hold them; on a CPU ``cpu_weights.py`` restores the parameters and packs them again, layer
by layer. A vLLM whose weights have other names or shards than in ``sharding.engine_shards`` is refused at startup. For
a model without a table, ``vllm_discovery.py`` finds once where vLLM's own loader puts each tensor: it loads tensors
whose values are their own coordinates, and ``discovered_layout.py`` reads blocks from what arrives. A waking engine
allocates its weights first, then the KV cache, each after PyTorch's cache was emptied;
``vllm_memory.py`` manages the GPU memory that engine and trainer share.
"""
