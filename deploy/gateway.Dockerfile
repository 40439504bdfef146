# The gateway only, without torch, engine and compiler: about 90 MB to pull, 250 MB on disk. Runs as an unprivileged user
# with a read-only root; only WARMPATH_DATA_DIR must be writable.
#   docker build -f deploy/gateway.Dockerfile -t warmpath-gateway .
FROM python:3.11.14-bookworm AS build
# Set to your mirror, if you have one.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv --without-pip /opt/warmpath
WORKDIR /src
COPY requirements-gateway.lock ./
RUN python -m pip --python /opt/warmpath/bin/python install --require-hashes -r requirements-gateway.lock
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY policies policies
COPY gateway gateway
# Symbols of debuggers are a tenth of the libraries.
RUN python -m pip --python /opt/warmpath/bin/python install --no-deps . \
 && find /opt/warmpath -name '*.so' -exec strip --strip-unneeded {} +

FROM build AS sbom
COPY constraints.txt ./
RUN python -m venv /opt/tools \
 && /opt/tools/bin/pip install --constraint constraints.txt cyclonedx-bom \
 && /opt/tools/bin/cyclonedx-py environment --output-reproducible --of JSON --output-file /sbom.cdx.json \
      /opt/warmpath/bin/python

FROM python:3.11.14-slim-bookworm
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="warmpath-gateway" \
      org.opencontainers.image.description="OpenAI-compatible gateway and caching proxy for self-hosted inference" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Python's own modules are compiled here, because a process without write access would compile them at every start.
RUN useradd --system --uid 10001 --create-home warmpath \
 && install -d -o warmpath -g warmpath /var/lib/warmpath \
 && python -m compileall -q "$(python -c 'import os; print(os.path.dirname(os.__file__))')" -x 'test|idlelib|lib2to3|site-packages'
COPY --from=build /opt/warmpath /opt/warmpath
COPY --from=sbom /sbom.cdx.json /opt/warmpath/sbom.cdx.json
# A container that listens only on its own loopback is not reachable.
ENV PATH=/opt/warmpath/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    WARMPATH_HOST=0.0.0.0 \
    WARMPATH_DATA_DIR=/var/lib/warmpath
USER 10001
WORKDIR /var/lib/warmpath
EXPOSE 8080
ENTRYPOINT ["warmpath"]
CMD ["serve"]
