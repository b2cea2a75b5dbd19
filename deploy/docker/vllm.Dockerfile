# vLLM with kdn's connector. Build it from the root of the clone:
#   docker build -f deploy/docker/vllm.Dockerfile -t kdn-vllm .
# kdn is made for vLLM 0.26 to 0.32.
ARG VLLM_VERSION=v0.32.0
FROM vllm/vllm-openai:${VLLM_VERSION}
COPY pyproject.toml README.md LICENSE /src/
COPY kdn /src/kdn
# After vLLM, and with what vLLM has pinned: kdn must not replace its torch.
RUN python3 -m pip freeze > /tmp/pins.txt \
    && python3 -m pip install --no-cache-dir -c /tmp/pins.txt /src \
    && rm -r /src /tmp/pins.txt
ENV KDN_CACHE=/var/cache/kdn
# Folders that volumes are mounted at: Docker would make missing ones for root.
RUN useradd --system --uid 10001 --create-home engine \
    && install -d -m 0700 -o 10001 -g 10001 /var/cache/kdn \
        /home/engine/.cache /home/engine/.cache/huggingface
USER 10001:10001
