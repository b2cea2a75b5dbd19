# A node, small: without torch. Build it from the root of the clone:
#   docker build -f deploy/docker/node.Dockerfile -t kdn-node .
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY deploy/docker/node-requirements.txt constraints.txt ./
RUN python -m venv /opt/kdn \
    && /opt/kdn/bin/pip install --no-cache-dir -c constraints.txt -r node-requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY kdn kdn
RUN /opt/kdn/bin/pip install --no-cache-dir --no-deps .

FROM python:3.11-slim-bookworm
COPY --from=build /opt/kdn /opt/kdn
# A user of its own. What it keeps is in one folder, which a volume is mounted at.
RUN useradd --system --uid 10001 --home-dir /var/lib/kdn --create-home kdn \
    && chmod 0700 /var/lib/kdn
USER 10001:10001
ENV PATH=/opt/kdn/bin:$PATH PYTHONDONTWRITEBYTECODE=1 KDN_NODE_DATA=/var/lib/kdn/node
VOLUME /var/lib/kdn
EXPOSE 8470
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s CMD ["python", "-c", \
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:8470/healthz', timeout=2)"]
# /etc/kdn/kdn.toml must be mounted: without tenants in it, a node does not listen beyond loopback.
ENTRYPOINT ["kdn", "node", "--config", "/etc/kdn/kdn.toml", "--host", "0.0.0.0"]
