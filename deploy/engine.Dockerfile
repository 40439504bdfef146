# The engine only, for CPUs, with the demo model and compiled kernels: no compiler is needed when it starts. About 440 MB
# to pull, 1.4 GB on disk, of which torch takes 0.75 GB and the kernels of all instruction sets 5 MB.
#   docker build -f deploy/engine.Dockerfile --build-arg PIP_EXTRA_INDEX_URL=INDEX -t warmpath-engine .
# INDEX is the index of torch's CPU builds. Without it, a package index may give torch for CUDA, which takes gigabytes and
# of which a CPU uses nothing; the build then stops and says so. --build-arg ALLOW_CUDA=1 accepts it.
FROM python:3.11.14-bookworm AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG ALLOW_CUDA=
# The image runs on other CPUs than that of the build, so the kernels of every instruction set are compiled.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 WARMPATH_KERNEL_LEVELS=all
RUN python -m venv --without-pip /opt/warmpath
WORKDIR /src
COPY constraints.txt ./
RUN python -m pip --python /opt/warmpath/bin/python install --constraint constraints.txt torch \
 && /opt/warmpath/bin/python -c "import os, sys, torch; sys.exit(torch.version.cuda and not os.getenv('ALLOW_CUDA') \
      and 'This is torch for CUDA. Pass PIP_EXTRA_INDEX_URL, or ALLOW_CUDA=1.')"
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY policies policies
COPY backend backend
RUN python -m pip --python /opt/warmpath/bin/python install --constraint constraints.txt ".[engine]" \
 && ls -l /opt/warmpath/lib/python3.11/site-packages/backend/native/compiled/*.so

FROM build AS sbom
COPY constraints.txt ./
RUN python -m venv /opt/tools \
 && /opt/tools/bin/pip install --constraint constraints.txt cyclonedx-bom \
 && /opt/tools/bin/cyclonedx-py environment --output-reproducible --of JSON --output-file /sbom.cdx.json \
      /opt/warmpath/bin/python

FROM python:3.11.14-slim-bookworm
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="warmpath-engine" \
      org.opencontainers.image.description="Paged-KV inference engine of Warmpath, for CPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# Python's own modules are compiled here, because a process without write access would compile them at every start.
RUN useradd --system --uid 10001 --create-home warmpath \
 && install -d -o warmpath -g warmpath /var/lib/warmpath \
 && python -m compileall -q "$(python -c 'import os; print(os.path.dirname(os.__file__))')" -x 'test|idlelib|lib2to3|site-packages'
COPY --from=build /opt/warmpath /opt/warmpath
COPY --from=sbom /sbom.cdx.json /opt/warmpath/sbom.cdx.json
# Models downloaded from the Hub, and whatever is compiled for this CPU, are stored in the volume.
ENV PATH=/opt/warmpath/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    XDG_CACHE_HOME=/var/lib/warmpath/cache \
    HF_HOME=/var/lib/warmpath/huggingface
USER 10001
WORKDIR /var/lib/warmpath
EXPOSE 8000
ENTRYPOINT ["python", "-m", "backend", "--host", "0.0.0.0", "--port", "8000"]
CMD ["--model", "demo"]
