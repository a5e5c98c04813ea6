"""What authors of strategies build on: import it from here, and the rest of the library may move.

Names are resolved at first access: importing this module loads neither torch nor a strategy.
``docs/how-to/write-a-strategy.md`` says what each is for.
"""

from typing import TYPE_CHECKING

from polyshard._lazy import lazy_names

if TYPE_CHECKING:
    from polyshard._describe import describe_owner as describe_owner
    from polyshard._describe import describe_value as describe_value
    from polyshard.config.base import DistributedConfig as DistributedConfig
    from polyshard.config.fields import accepts as accepts
    from polyshard.config.fields import is_bool as is_bool
    from polyshard.config.fields import is_dtype as is_dtype
    from polyshard.config.fields import is_one_of as is_one_of
    from polyshard.config.fields import optional as optional
    from polyshard.config.fields import reject as reject
    from polyshard.config.fields import to_dtype_name as to_dtype_name
    from polyshard.config.precision import torch_dtype as torch_dtype
    from polyshard.mesh.devices import axis_sizes as axis_sizes
    from polyshard.mesh.devices import mesh_device as mesh_device
    from polyshard.parameters.gradient_hooks import weakly as weakly
    from polyshard.parameters.guard import ParameterGuard as ParameterGuard
    from polyshard.parameters.names import canonical_parameter_name as canonical_parameter_name
    from polyshard.parameters.names import canonical_parameters as canonical_parameters
    from polyshard.parameters.optimizer_binding import rebind as rebind
    from polyshard.parameters.optimizer_binding import record_names as record_names
    from polyshard.parameters.optimizer_binding import split_mixed_groups as split_mixed_groups
    from polyshard.parameters.slots import ParameterSlot as ParameterSlot
    from polyshard.parameters.slots import parameter_attributes as parameter_attributes
    from polyshard.parameters.slots import restore_attributes as restore_attributes
    from polyshard.parameters.slots import slots_of as slots_of
    from polyshard.parameters.snapshot import ParameterSnapshot as ParameterSnapshot
    from polyshard.parameters.snapshot import SavedParameter as SavedParameter
    from polyshard.registry.hookspecs import hookimpl as hookimpl
    from polyshard.transforms.activation_checkpointing import checkpoint_units as checkpoint_units
    from polyshard.transforms.checks import require_dimensions as require_dimensions
    from polyshard.transforms.checks import require_materialized as require_materialized
    from polyshard.transforms.checks import require_parameters as require_parameters
    from polyshard.transforms.tensor_parallel import apply_plan as apply_plan
    from polyshard.transforms.tensor_parallel import module_plan as module_plan
    from polyshard.transforms.units import UnitReport as UnitReport
    from polyshard.transforms.units import find_units as find_units

_HOMES = {
    "DistributedConfig": "polyshard.config.base",
    "ParameterGuard": "polyshard.parameters.guard",
    "ParameterSlot": "polyshard.parameters.slots",
    "ParameterSnapshot": "polyshard.parameters.snapshot",
    "SavedParameter": "polyshard.parameters.snapshot",
    "UnitReport": "polyshard.transforms.units",
    "accepts": "polyshard.config.fields",
    "apply_plan": "polyshard.transforms.tensor_parallel",
    "axis_sizes": "polyshard.mesh.devices",
    "canonical_parameter_name": "polyshard.parameters.names",
    "canonical_parameters": "polyshard.parameters.names",
    "checkpoint_units": "polyshard.transforms.activation_checkpointing",
    "describe_owner": "polyshard._describe",
    "describe_value": "polyshard._describe",
    "find_units": "polyshard.transforms.units",
    "hookimpl": "polyshard.registry.hookspecs",
    "is_bool": "polyshard.config.fields",
    "is_dtype": "polyshard.config.fields",
    "is_one_of": "polyshard.config.fields",
    "mesh_device": "polyshard.mesh.devices",
    "module_plan": "polyshard.transforms.tensor_parallel",
    "optional": "polyshard.config.fields",
    "parameter_attributes": "polyshard.parameters.slots",
    "rebind": "polyshard.parameters.optimizer_binding",
    "record_names": "polyshard.parameters.optimizer_binding",
    "reject": "polyshard.config.fields",
    "require_dimensions": "polyshard.transforms.checks",
    "require_materialized": "polyshard.transforms.checks",
    "require_parameters": "polyshard.transforms.checks",
    "restore_attributes": "polyshard.parameters.slots",
    "slots_of": "polyshard.parameters.slots",
    "split_mixed_groups": "polyshard.parameters.optimizer_binding",
    "to_dtype_name": "polyshard.config.fields",
    "torch_dtype": "polyshard.config.precision",
    "weakly": "polyshard.parameters.gradient_hooks",
}

__all__ = sorted(_HOMES)

__getattr__, __dir__ = lazy_names(globals(), _HOMES)
