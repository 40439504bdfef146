"""What the calls of one key for one model name have in common, computed once per policy.

That is the model, the tenant's limits on output, the transform plan, the salt and the formulas for media. The policy's
routes and rules are compiled here too, so that they choose the model and the latency class of a call quickly.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from gateway.core.errors import Forbidden, ModelNotFound
from gateway.policy import LatencyClass, Model, Policy, Tenant, TenantLimits
from gateway.policy.media_formulas import MediaFormula
from gateway.policy.wildcards import STAR
from gateway.prefix.fingerprint import seed_of
from gateway.prompts.matching import Conditions, Headers, MatchedCall
from gateway.prompts.model_choice import choose_route
from gateway.prompts.reader import ParsedBody
from gateway.prompts.sessions import conversation_of
from gateway.prompts.transforms import VERSION, TransformPlan
from gateway.types import Operation, Principal

SALT_BYTES = 16
MAX_CONTEXTS = 50_000  # pairs of a key and a model name
MAX_NAME_CHARACTERS = 200  # of a client's name in an error message; no policy has longer ones
ROUTED = "\0"  # begins the name of a model that a route chose, which the caller need not be allowed to use


class CallerContext(msgspec.Struct, frozen=True):
    """What all calls of one key for one model name have in common under one policy."""

    principal: Principal
    model: Model
    tenant_name: str
    model_name: str
    output_cap: TenantLimits | None  # of the tenant, if they bound the output of calls that do not
    plan: TransformPlan  # that the policy wants for new conversations
    salt: str
    seed: int
    media_formulas: tuple[MediaFormula, ...]  # of the model's deployments
    wildcard: str  # what the `*` in the model's name stands for
    has_weights: bool = False  # the model's weights choose the deployment of a conversation
    route: str | None = None
    routed_model: str | None = None


class CallerContexts:
    """Makes and remembers the contexts of one policy, that of the newest call. Owned by the event loop."""

    def __init__(self, secret: bytes) -> None:
        """`secret` is the key of the tenants' salts, so that they cannot be computed without it."""
        self.has_routes = False  # of the policy
        self._secret = secret
        self._salts: dict[tuple[str, str | None], str] = {}  # by tenant and cache group
        self._policy: Policy | None = None
        # All of these belong to that policy.
        self._plans: dict[tuple[str, str], TransformPlan] = {}  # by tenant and model
        self._contexts: dict[tuple[str, str], CallerContext] = {}  # by key and model name
        self._rules: list[tuple[Conditions, str]] = []  # each with its latency class
        self._routes: list[Conditions] = []
        self._classes: dict[str, LatencyClass] = {}
        self._default_class = ""

    def find(self, policy: Policy, principal: Principal, name: str) -> CallerContext:
        """The context of a key's calls for a model name.

        Raises `ModelNotFound` or `Forbidden`. Nothing is remembered about callers who may not use the model.
        """
        context = self._contexts.get((principal.key_id, name))
        if context is not None and policy is self._policy and principal is context.principal:
            return context
        if policy is not self._policy or len(self._contexts) >= MAX_CONTEXTS:
            self._use_policy(policy)
        model, wildcard = _model(policy, principal, name), policy.wildcard_part(name)
        context = self._contexts[principal.key_id, name] = self._make_context(policy, principal, model, wildcard)
        return context

    def routed(
        self, context: CallerContext, policy: Policy, operation: Operation, parsed: ParsedBody, headers: Headers
    ) -> CallerContext:
        """The context for the model and deployments to which the policy's routes send the call, or the given one."""
        principal, common = context.principal, parsed.common
        call = MatchedCall(principal, operation, parsed, 0, headers)
        chosen = choose_route(
            policy.model_routes,
            lambda index: self._routes[index].hold(call),
            parsed,
            conversation_of(common, headers, context.salt),
        )
        if chosen is None:
            return context
        index, target = chosen
        asked = target or common.model
        if STAR in asked:
            asked = asked.replace(STAR, context.wildcard)
        name = f"{ROUTED}{index}:{asked}"
        known = self._contexts.get((principal.key_id, name))
        if known is not None and known.principal is principal:
            return known
        model = policy.find_model(asked)
        if model is None or not policy.model_routes[index].deployments:
            narrowed = model
        else:
            narrowed = policy.routed_models.get((index, model.name))
        if narrowed is None:
            return context  # the model has none of the route's deployments
        route = policy.model_routes[index].name
        moved = None if model is context.model and asked == common.model else asked
        routed = self._make_context(policy, principal, narrowed, policy.wildcard_part(asked))
        routed = msgspec.structs.replace(routed, route=route, routed_model=moved)
        self._contexts[principal.key_id, name] = routed
        return routed

    def choose_class(
        self, principal: Principal, operation: Operation, parsed: ParsedBody, prompt_tokens: int, headers: Headers
    ) -> tuple[int | None, str, LatencyClass]:
        """The first matching rule's index, and its latency class by name and value.

        The index is None if no rule matches; the class is then the policy's default. Raises `Forbidden` if the key may
        not use the class.
        """
        rule, name = None, self._default_class
        if self._rules:
            call = MatchedCall(principal, operation, parsed, prompt_tokens, headers)
            for index, (conditions, class_name) in enumerate(self._rules):
                if conditions.hold(call):
                    rule, name = index, class_name
                    break
        if principal.classes is not None and name not in principal.classes:
            raise Forbidden(f"the key {principal.key_id!r} may not use the class {name!r}")
        return rule, name, self._classes[name]

    def _use_policy(self, policy: Policy) -> None:
        self._policy, self._plans, self._contexts = policy, {}, {}
        self._rules = [(Conditions(rule.match), rule.latency_class) for rule in policy.rules]
        self._routes = [Conditions(route.match) for route in policy.model_routes]
        self.has_routes = bool(self._routes)
        self._classes, self._default_class = policy.classes, policy.default_class

    def _make_context(self, policy: Policy, principal: Principal, model: Model, wildcard: str) -> CallerContext:
        tenant = principal.tenant
        plan, salt = self._plan(policy, tenant.name, model.name), self._salt(tenant)
        # One deployment with a `*` serves several models, and each has a prefix cache of its own.
        seed = seed_of(f"{salt}\n{wildcard}" if wildcard else salt)
        return CallerContext(
            principal,
            model,
            tenant.name,
            model.name,
            None if tenant.limits.cap_output is None else tenant.limits,
            plan,
            salt,
            seed,
            policy.media_formulas[model.name],
            wildcard,
            has_weights=model.weights is not None,
        )

    def _plan(self, policy: Policy, tenant: str, model: str) -> TransformPlan:
        """What the policy wants. Returns the same object as long as the policy is the same."""
        plan = self._plans.get((tenant, model))
        if plan is None:
            form = policy.canonicalise.form_for(tenant, model)
            plan = self._plans[tenant, model] = TransformPlan(VERSION, form.level, form.opt_in, form.template_date)
        return plan

    def _salt(self, tenant: Tenant) -> str:
        """The tenant's salt, or its cache group's.

        A group's salt differs from every tenant's, even if the names are equal.
        """
        owner = (tenant.name, tenant.cache_group)
        if owner not in self._salts:
            group = tenant.cache_group
            name = f"cache-salt:{tenant.name}" if group is None else f"cache-group:{group}"
            digest = hmac.new(self._secret, name.encode(), hashlib.sha256).digest()
            self._salts[owner] = digest[:SALT_BYTES].hex()
        return self._salts[owner]


def _model(policy: Policy, principal: Principal, name: str) -> Model:
    """The model that a name or alias stands for, if the caller may use it.

    To a caller, a model that its tenant may not use does not exist. A key that may use fewer models than its tenant
    gets `Forbidden`.
    """
    model = policy.find_model(name) if len(name) <= MAX_NAME_CHARACTERS else None
    if model is None or not principal.tenant_may_use(model, name) or not name.isprintable() or STAR in name:
        shown = name[:MAX_NAME_CHARACTERS]
        raise ModelNotFound(f"the model {shown!r} does not exist or you do not have access to it", param="model")
    if not principal.may_use(model, name):
        raise Forbidden(f"the key {principal.key_id!r} may not use the model {name!r}", param="model")
    return model
