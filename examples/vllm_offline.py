"""vLLM's offline engine with kdn's connector: what it reads, every other engine knows.

Run it twice: the second engine loads what the first has read. (Within one engine, vLLM's own prefix
cache answers first.) SmolLM2's profile is shipped with kdn; for other models, add
"codec": "exact", or calibrate.
"""

import sys
from pydoc_data.topics import topics

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

PROMPT = topics["global"] + "\n\nIn short, the global statement"


def main(
    url: str, model: str, max_tokens: int = 12, host_bytes: int = 2 << 30, **settings
) -> tuple[int, str]:
    """How many tokens of the prompt were known, and the answer. `host_bytes`: of memory that all
    engines of this host share."""
    transfer = KVTransferConfig(
        kv_connector="KdnConnector",
        kv_connector_module_path="kdn.engines.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"url": url, "deadline_s": 30.0, "host_bytes": host_bytes},
    )
    engine = LLM(model=model, kv_transfer_config=transfer, **settings)
    [output] = engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=max_tokens))
    known = output.num_cached_tokens or 0
    print(f"{known} of {len(output.prompt_token_ids)} tokens were known:{output.outputs[0].text}")
    engine.llm_engine.engine_core.shutdown()  # publishes what is still waiting
    return known, output.outputs[0].text


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: vllm_offline.py URL_OF_A_NODE MODEL")
    main(*sys.argv[1:])
