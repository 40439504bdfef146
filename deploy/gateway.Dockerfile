# The gateway only, without torch, engine and compiler.
#   docker build -f deploy/gateway.Dockerfile -t warmpath-gateway .
FROM python:3.11.14-slim-bookworm AS build
# Set to your mirror, if you have one.
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/warmpath
WORKDIR /src
COPY requirements-gateway.lock ./
RUN /opt/warmpath/bin/pip install --require-hashes -r requirements-gateway.lock
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY policies policies
COPY gateway gateway
RUN /opt/warmpath/bin/pip install --no-deps .

FROM python:3.11.14-slim-bookworm
RUN useradd --system --uid 10001 --create-home warmpath \
 && install -d -o warmpath -g warmpath /var/lib/warmpath
COPY --from=build /opt/warmpath /opt/warmpath
# A container that listens only on its own loopback is not reachable.
ENV PATH=/opt/warmpath/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    WARMPATH_HOST=0.0.0.0 \
    WARMPATH_DATA_DIR=/var/lib/warmpath
USER warmpath
WORKDIR /var/lib/warmpath
EXPOSE 8080
ENTRYPOINT ["warmpath"]
CMD ["serve"]
