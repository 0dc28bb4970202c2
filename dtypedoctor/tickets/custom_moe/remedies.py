"""Fixes that are options of the custom decoder: other owners of a model change its keep list or its loading."""

from dtypedoctor.trials.remedies import Remedy, with_options

_MODEL = "builtin:custom-moe"

REMEDIES = (
    Remedy(
        id="drop-keep-in-fp32",
        summary="keep no module in float32; the norms' weights are rounded to the model's dtype",
        safe=True,
        change=with_options(_MODEL, keep_in_fp32=[]),
        prefer="you own the model's keep list, and rounding the norms' weights is no matter",
    ),
    Remedy(
        id="reconcile-dtypes-ignoring-keep-list",
        summary="cast everything to the model's dtype after loading, kept modules too, whose weights are rounded",
        safe=True,
        change=with_options(_MODEL, reconcile="ignore-keep-list"),
        prefer="the keep list belongs to somebody else, and rounding what it names is no matter",
    ),
    Remedy(
        id="reconcile-dtypes-honouring-keep-list",
        summary="cast everything but the kept modules to the model's dtype after loading",
        safe=True,
        change=with_options(_MODEL, reconcile="honour-keep-list"),
    ),
)
