# Outrider's server on CPUs: docker build -t outrider . (docs/container.md)
# The guard alone: docker build --target guard -t outrider-guard .
# deploy/rehearse.py builds and runs both without a Docker daemon.

ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3-pip g++ cmake ninja-build \
 && rm -rf /var/lib/apt/lists/*
# No pip inside: it is not needed where the server runs.
RUN python3 -m venv --without-pip /opt/outrider
WORKDIR /build
# Both, as in the Makefile: older and newer pips read them for the packages that build this one.
ENV PIP_CONSTRAINT=/build/constraints.txt PIP_BUILD_CONSTRAINT=/build/constraints.txt
COPY constraints.txt pyproject.toml ./
# Where the CPU build of torch lies, for models without a native step; empty: no torch.
ARG TORCH_INDEX=
# The dependencies alone: a change of the sources does not fetch them again.
RUN python3 -c "import sys, tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*p['dependencies'], *(p['optional-dependencies']['torch'] if sys.argv[1] else ()), sep='\n')" \
    "$TORCH_INDEX" > requirements.txt \
 && pip --python /opt/outrider/bin/python install --no-cache-dir --requirement requirements.txt \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}
COPY CMakeLists.txt README.md LICENSE ./
COPY src src
# One library for each instruction set, chosen at run time: the image runs on every CPU of its kind.
# Without a compiler there would be none, and no model would run: that fails here.
RUN pip --python /opt/outrider/bin/python install --no-cache-dir --no-deps . \
 && ls /opt/outrider/lib/python3*/site-packages/outrider/native/outrider_portable.so
# Libraries' own tests stay behind.
RUN find /opt/outrider -type d -name tests -prune -exec rm -r {} +

FROM ${BASE} AS guard-build
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3-pip \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv --without-pip /opt/outrider
WORKDIR /build
ENV PIP_CONSTRAINT=/build/constraints.txt PIP_BUILD_CONSTRAINT=/build/constraints.txt
COPY constraints.txt ./
# All that the guard imports.
ARG GUARD_NEEDS="httpx prometheus-client pydantic pyyaml rich typer"
RUN pip --python /opt/outrider/bin/python install --no-cache-dir $GUARD_NEEDS
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY src src
# There is no compiler, so no native step either; the pocket pair stays behind.
RUN rm -r src/outrider/pocket/model src/outrider/native/src \
 && pip --python /opt/outrider/bin/python install --no-cache-dir --no-deps .
# Python, what it loads, and nothing else of the system: no shell, no packages.
COPY deploy/guard-root.sh ./
RUN sh guard-root.sh /guard

FROM scratch AS guard
COPY --from=guard-build /guard /
ENV PATH=/opt/outrider/bin \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /tmp
USER 10001:10001
EXPOSE 9109
ENTRYPOINT ["outrider"]
CMD ["ops", "guard", "--help"]

FROM ${BASE} AS server
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 \
 && apt-get clean \
 && rm -rf /var/lib/apt/lists/*
# Libraries ask for the name of their user.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin outrider
COPY --from=build /opt/outrider /opt/outrider
# What libraries want to write goes to /tmp, the only place that need be writable.
ENV PATH=/opt/outrider/bin:${PATH} \
    HOME=/tmp \
    XDG_CACHE_HOME=/tmp/cache \
    HF_HOME=/tmp/huggingface \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    OUTRIDER_HOST=0.0.0.0
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000
# http.client and no urllib: a proxy in the environment is not asked for this address.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import http.client, os; c = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('OUTRIDER_PORT', 8000)), timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["outrider"]
CMD ["serve"]
