"""The provider for Azure OpenAI: OpenAI's bodies, with the deployment's name in the path and a version in the query."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar
from urllib.parse import quote

from gateway.policy import Deployment, Secret
from gateway.policy.upstream_requests import encoded_query
from gateway.providers.openai import OpenAI
from gateway.providers.transport import HTTPTransport
from gateway.types import Call

API_VERSION = "2024-10-21"  # if the policy's `query` has no api-version
_ROOT = b"/openai"


class Azure(OpenAI):
    """Provider for one deployment at Azure. `base_url` is the resource's, with or without /openai."""

    key_header: ClassVar[str] = "api-key"
    lists_deployments: ClassVar[bool] = False  # it lists base models

    def __init__(
        self, deployment: Deployment, transport: HTTPTransport, resolve_secret: Callable[[Secret], str]
    ) -> None:
        super().__init__(deployment, transport, resolve_secret)
        self._base_path = self._base_path.removesuffix(_ROOT) + _ROOT
        self._query = encoded_query({"api-version": API_VERSION, **deployment.query})

    @property
    def models_path(self) -> bytes:
        """The path of the list of base models, which needs the version, too."""
        return b"%b/models%b" % (self._base_path, self._query)

    def base_path_of(self, call: Call) -> bytes:
        """Return the path of the deployment at Azure."""
        return b"%b/deployments/%b" % (self._base_path, quote(self.model_of(call), safe="").encode())
