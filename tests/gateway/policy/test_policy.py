from decimal import Decimal
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.policy import BUILT_IN_CLASSES, Deployment, Policy, Price, choices
from gateway.policy.fields import parse_count, parse_duration, parse_rate, parse_share


def minimal(**more: Any) -> dict[str, Any]:
    return {
        "deployments": [{"name": "a", "base_url": "http://a/v1", "model": "m"}],
        "models": [{"name": "m", "aliases": ["n"], "deployments": ["a"]}],
        "tenants": [{"name": "t"}],
        **more,
    }


def problems(document: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        Policy.model_validate(document)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("250ms", 0.25), ("10s", 10), ("1.5m", 90), ("24h", 86400), ("7d", 604800), (" 3 s ", 3), (5, 5)],
)
def test_durations(text: Any, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "count"), [("600", 600), ("64k", 64_000), ("1.5M", 1_500_000), ("2G", 2_000_000_000), (7, 7)]
)
def test_counts(text: Any, count: int) -> None:
    assert parse_count(text) == count


def test_rates_and_shares() -> None:
    assert parse_rate("1M/30s") == {"amount": 1_000_000, "period": 30.0}
    assert parse_share("10%") == pytest.approx(0.1)
    assert parse_share(0.25) == 0.25


@pytest.mark.parametrize(
    ("parse", "value"),
    [
        (parse_duration, "10"),
        (parse_duration, "soon"),
        (parse_duration, True),
        (parse_count, "1.5"),  # half a request
        (parse_count, "-3"),
        (parse_count, False),
        (parse_rate, "600"),
        (parse_rate, 600),
        (parse_rate, "600/"),
        (parse_share, "x%"),
        (parse_share, "10"),
    ],
)
def test_invalid_quantities_are_rejected(parse: Any, value: Any) -> None:
    with pytest.raises(ValueError, match="as in"):
        parse(value)


@pytest.mark.parametrize(
    "classes", [{"realtime": {"total": 0}}, {"realtime": {"total": float("inf")}}, {"realtime": {"max_queue": -1}}]
)
def test_quantities_have_bounds(classes: dict[str, Any]) -> None:
    assert "classes.realtime" in problems(minimal(classes=classes))


def test_a_policy_overrides_only_the_fields_of_built_in_classes_that_it_sets() -> None:
    policy = Policy.model_validate(minimal(classes={"batch": {"ttft": "5s"}, "slow": {}}))
    assert set(policy.classes) == {"realtime", "batch", "slow"}
    assert policy.classes["batch"].ttft == 5
    assert policy.classes["batch"].total == BUILT_IN_CLASSES["batch"]["total"]
    assert policy.classes["realtime"].max_wait == BUILT_IN_CLASSES["realtime"]["max_wait"]


def test_a_single_name_is_a_list_and_header_names_are_case_insensitive() -> None:
    rule = {"match": {"tenant": "t", "model": ["m", "n"], "header": {"X-Class": "Batch"}}, "class": "batch"}
    match = Policy.model_validate(minimal(rules=[rule])).rules[0].match
    assert match.tenant == ("t",)
    assert match.model == ("m", "n")
    assert match.header == {"x-class": "Batch"}


def test_prices_are_decimals_of_the_written_digits() -> None:
    document = minimal()
    document["deployments"][0]["price"] = {"input": 0.1, "output": "0.30"}
    (price,) = Policy.model_validate(document).deployments[0].price
    assert price.input == Decimal("0.1")
    assert price.output == Decimal("0.30")


def test_duplicate_names_and_aliases_are_reported() -> None:
    document = minimal(tenants=[{"name": "t"}, {"name": "t"}])
    document["models"].append({"name": "n", "deployments": ["a"]})
    text = problems(document)
    assert "models.1.name: the model name 'n' is used twice" in text
    assert "tenants.1.name: the tenant name 't' is used twice" in text


def test_names_that_discovered_servers_can_have_are_reported() -> None:
    document = minimal()
    document["deployments"] += [
        {"name": "pods", "source": {"file": "pods.json"}},
        {"name": "pods/pod-1", "base_url": "http://10.0.0.1/v1", "model": "m"},
        {"name": "vendor/model", "base_url": "http://10.0.0.2/v1", "model": "m"},
    ]
    text = problems(document)
    assert "deployments.2.name: 'pods/pod-1' can be the name of a server that 'pods' finds" in text
    assert "vendor/model" not in text


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"models": [{"name": "m", "deployments": ["b"]}]}, "models.0.deployments: there is no deployment 'b'"),
        (
            {"models": [{"name": "m", "deployments": ["a"], "fallbacks": ["m"]}]},
            "models.0.fallbacks: there is no other model 'm'",
        ),
        ({"default_class": "fast"}, "default_class: there is no class 'fast'"),
        ({"rules": [{"match": {}, "class": "fast"}]}, "rules.0.class: there is no class 'fast'"),
        ({"rules": [{"match": {"tenant": "u"}, "class": "batch"}]}, "rules.0.match.tenant: there is no tenant 'u'"),
        ({"rules": [{"match": {"model": "x"}, "class": "batch"}]}, "rules.0.match.model: there is no model 'x'"),
        ({"tenants": [{"name": "t", "models": ["x"]}]}, "tenants.0.models: there is no model 'x'"),
    ],
)
def test_unknown_names_are_reported(section: dict[str, Any], problem: str) -> None:
    assert problem in problems(minimal(**section))


def test_a_budget_needs_prices_in_one_currency() -> None:
    document = minimal(tenants=[{"name": "t", "limits": {"budget": {"amount": 5}}}])
    for name, currency in (("usd", "USD"), ("eur", "EUR")):
        price = {"input": 1, "currency": currency}
        document["deployments"].append({"name": name, "base_url": "http://a", "model": "m", "price": price})
    assert "tenants.0.limits.budget: a budget needs all prices in one currency, not in EUR and USD" in problems(
        document
    )


def test_minimum_shares_of_more_than_all_are_reported() -> None:
    shares = {"realtime": {"min_share": "60%"}, "batch": {"min_share": "50%"}}
    assert "classes.realtime.min_share: the min_share values of realtime, batch add up to more than 100%" in problems(
        minimal(classes=shares)
    )


def test_the_hash_depends_on_the_content() -> None:
    policy = Policy.model_validate(minimal())
    assert policy.hash == Policy.model_validate(minimal()).hash
    assert policy.hash != Policy.model_validate(minimal(cache={"ttl": "1s"})).hash
    assert len(policy.hash) == 16


def test_models_are_found_by_name_and_alias() -> None:
    policy = Policy.model_validate(minimal())
    assert policy.models_by_name["m"] is policy.models_by_name["n"] is policy.models[0]


def test_choices_suggest_only_similar_names() -> None:
    assert choices("locla", ["remote", "local"]) == "known: local, remote; did you mean 'local'?"
    assert choices("x", ["local"]) == "known: local"
    assert choices("x", []) == "known: none"


@pytest.mark.parametrize("price", ["0.1234567891", "1234567890123"])
def test_prices_have_no_more_digits_than_the_ledger_s_reader_supports(price: str) -> None:
    with pytest.raises(ValidationError):
        Price.model_validate({"input": price})


def test_names_cannot_contain_control_characters_because_headers_contain_names() -> None:
    with pytest.raises(ValidationError):
        Deployment.model_validate({"name": "a\r\nx-forged: 1", "base_url": "http://a/v1", "model": "m"})


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"parts": [{"match": {}}]}, "must name a model or a class"),
        ({"parts": [{"requests": "1/1m"}]}, "match"),
        ({"parts": [{"match": {"model": "x"}}]}, "there is no model 'x'"),
        ({"parts": [{"match": {"class": "x"}}]}, "there is no class 'x'"),
        ({"parts": [{"match": {"model": ["m", "n"]}}, {"match": {"model": ["n", "m"]}}]}, "is used twice"),
        ({"parts": [{"match": {"model": "m"}, "default_output_tokens": 5}]}, "default_output_tokens"),
        ({"cached_input_weight": "200%"}, "cached_input_weight"),
        ({"budget": {"amount": 1, "per": "year"}}, "'hour', 'day', 'week', 'month' or 'total'"),
    ],
)
def test_limits_of_parts_are_checked(limits: dict[str, Any], problem: str) -> None:
    assert problem in problems(minimal(tenants=[{"name": "t", "limits": limits}]))


def test_a_key_s_classes_and_limits_are_checked() -> None:
    key = {"id": "k", "hash": f"hmac-sha256:{'0' * 64}"}

    def policy(**more: Any) -> dict[str, Any]:
        return minimal(tenants=[{"name": "t", "keys": [{**key, **more}]}])

    Policy.model_validate(policy(classes=["batch"], limits={"requests": "1/1m"}))
    assert "there is no class 'x'" in problems(policy(classes=["x"]))
    assert "parts" in problems(policy(limits={"parts": []}))  # keys have no parts
    document = policy(limits={"budget": {"amount": 1}})
    for name, currency in (("a", "USD"), ("b", "EUR")):
        price = {"input": 1, "currency": currency}
        document["deployments"].append({"name": f"{name}2", "base_url": "http://a/v1", "model": "m", "price": price})
    assert "tenants.0.keys.0.limits.budget: a budget needs all prices in one currency" in problems(document)
