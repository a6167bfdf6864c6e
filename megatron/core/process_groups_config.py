"""The process groups of a job as one value that is passed, not looked up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron.core import parallel_state

# Values other than a group that code written for Megatron may meet here: no such group.
Group = dist.ProcessGroup | None


@dataclass(init=False, repr=False)
class ProcessGroupCollection:
    """Process groups by Megatron's attribute names; set those that there are.

    Reading one that was not set raises ``AttributeError``. Where there is neither pipeline nor context
    parallelism, ``pp`` and ``cp`` are this rank alone and ``dp_cp`` equals ``dp``.

    Attributes:
        tp: Tensor parallel.
        pp: This rank alone.
        mp: One copy of the dense parameters: TP x GTP.
        embd: This rank alone.
        pos_embd: This rank alone.
        cp: This rank alone.
        tp_cp: TP.
        hcp: ``None``.
        ep: Experts are spread over it.
        expt_tp: Tensor parallel, of experts.
        tp_ep: Expert TP x EP.
        tp_ep_pp: Expert TP x EP.
        tp_ep_pp_with_egtp_remat: One copy of the experts: expert TP x EP x expert GTP.
        tp_dp_cp: TP x GTP x DP.
        dp: Ranks that hold the same dense parameters.
        dp_cp: The same.
        dp_cp_gtp_remat: Ranks with batches of their own: DP x GTP.
        dp_cp_ag: ``None``.
        gtp_remat: A TP-local weight is cut over it.
        expt_gtp_remat: A TP-local expert weight is cut over it.
        expt_tp_gtp_remat: One copy of an expert's weights: expert TP x expert GTP.
        expt_dp: Ranks that hold the same experts' parameters.
        expt_dp_gtp_remat: Expert DP x expert GTP.
        expt_dp_ag: ``None``.
        intra_dp_cp: ``dp_cp`` inside one distributed-optimizer instance.
        intra_expt_dp: ``expt_dp`` inside one instance.
        inter_dist_opt: Peers, one in each instance.
        intra_dist_opt: All ranks of one instance.
    """

    tp: Group = field(init=False)
    pp: Group = field(init=False)
    mp: Group = field(init=False)
    embd: Group = field(init=False)
    pos_embd: Group = field(init=False)
    cp: Group = field(init=False)
    tp_cp: Group = field(init=False)
    hcp: list[dist.ProcessGroup] | None = field(init=False)
    ep: Group = field(init=False)
    expt_tp: Group = field(init=False)
    tp_ep: Group = field(init=False)
    tp_ep_pp: Group = field(init=False)
    tp_ep_pp_with_egtp_remat: Group = field(init=False)
    tp_dp_cp: Group = field(init=False)
    dp: Group = field(init=False)
    dp_cp: Group = field(init=False)
    dp_cp_gtp_remat: Group = field(init=False)
    dp_cp_ag: Group = field(init=False)
    gtp_remat: Group = field(init=False)
    expt_gtp_remat: Group = field(init=False)
    expt_tp_gtp_remat: Group = field(init=False)
    expt_dp: Group = field(init=False)
    expt_dp_gtp_remat: Group = field(init=False)
    expt_dp_ag: Group = field(init=False)
    intra_dp_cp: Group = field(init=False)
    intra_expt_dp: Group = field(init=False)
    inter_dist_opt: Group = field(init=False)
    intra_dist_opt: Group = field(init=False)

    def __init__(self, **groups: Any) -> None:
        known = {f.name for f in fields(self)}
        for name, group in groups.items():
            if name not in known:
                raise ValueError(
                    f"Unknown attribute: {name}; a ProcessGroupCollection has {sorted(known)}"
                )
            setattr(self, name, group)

    def __repr__(self) -> str:
        sizes = [f"{name}({group.size()})" for name, group in vars(self).items() if group]
        return f"ProcessGroupCollection({', '.join(sizes) or 'empty'})"

    @classmethod
    def use_mpu_process_groups(
        cls, required_pgs: Sequence[str] | None = None
    ) -> ProcessGroupCollection:
        """The groups of :mod:`megatron.core.parallel_state`.

        Args:
            required_pgs: Names of the attributes to set; all of them if ``None``.

        Raises:
            ValueError: If a name is not one of the attributes.
            RuntimeError: If the groups do not exist yet.
        """
        names = list(_FROM_PARALLEL_STATE) if required_pgs is None else list(required_pgs)
        unknown = [name for name in names if name not in _FROM_PARALLEL_STATE]
        if unknown:
            raise ValueError(
                f"Invalid process groups requested: {unknown}; there are {list(_FROM_PARALLEL_STATE)}"
            )
        return cls(**{name: _FROM_PARALLEL_STATE[name]() for name in names})

    @staticmethod
    def is_gtp_remat_active(process_group_dict: dict[str, Any]) -> bool:
        """Whether weights, dense or experts', are cut over more than one GTP rank."""
        groups = (
            process_group_dict.get(f"{kind}_group") for kind in ("gtp_remat", "expt_gtp_remat")
        )
        return any(group is not None and group.size() > 1 for group in groups)

    @staticmethod
    def setup_process_groups_for_ddp(
        pg_collection: ProcessGroupCollection | None, config: Any, ddp_config: Any
    ) -> dict[str, Any]:
        """The groups that DistributedDataParallel needs.

        Args:
            pg_collection: Those to take them from; the registry's if ``None``.
            config: Not looked at; there is no context parallelism.
            ddp_config: Gives ``num_distributed_optimizer_instances``.

        Returns:
            ``dp_group``, ``dp_cp_group``, ``intra_dp_cp_group``, ``expt_dp_group``,
            ``intra_expt_dp_group``, ``tp_group``, ``pp_group``, ``ep_group``, ``gtp_remat_group``,
            ``expt_gtp_remat_group``, ``inter_dist_opt_group``, ``intra_dist_opt_group``.

        Raises:
            ValueError: If a group that cannot be told from the others was not set.
        """
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        result = _data_parallel_groups(groups, ddp_config)
        for name in ("tp", "pp", "ep"):
            result[f"{name}_group"] = _required(groups, name)
        return result

    @staticmethod
    def setup_process_groups_for_optimizer(
        pg_collection: ProcessGroupCollection | None,
        model_chunks: Sequence[Any],
        use_gloo_process_groups: bool = True,
    ) -> dict[str, Any]:
        """The groups that an optimizer needs.

        Args:
            pg_collection: Those to take them from; the registry's if ``None``.
            model_chunks: The first one's ``ddp_config``, if any, tells the number of instances.
            use_gloo_process_groups: Also return the registry's gloo twins.

        Returns:
            ``dp_group``, ``dp_cp_group``, ``intra_dp_cp_group``, ``expt_dp_group``,
            ``intra_expt_dp_group``, ``mp_group``, ``expt_tp_pp_group``,
            ``expt_tp_pp_with_egtp_remat_group``, ``gtp_remat_group``, ``expt_gtp_remat_group``,
            ``inter_dist_opt_group``, ``intra_dist_opt_group``, ``intra_dp_cp_group_gloo``,
            ``intra_expt_dp_group_gloo``.

        Raises:
            ValueError: If a group that cannot be told from the others was not set, or gloo twins are
                asked for together with ``pg_collection``.
        """
        if pg_collection is not None and use_gloo_process_groups:
            raise ValueError(
                "Gloo process groups are not supported when pg_collection is provided; pass "
                "use_gloo_process_groups=False"
            )
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        ddp_config = getattr(model_chunks[0], "ddp_config", None)
        result = _data_parallel_groups(groups, ddp_config)
        if pg_collection is not None:
            _required(groups, "expt_dp")
        result["mp_group"] = _required(groups, "mp")
        result["expt_tp_pp_group"] = _required(groups, "tp_ep_pp")
        result["expt_tp_pp_with_egtp_remat_group"] = getattr(
            groups, "tp_ep_pp_with_egtp_remat", result["expt_tp_pp_group"]
        )
        gloo = use_gloo_process_groups and not ProcessGroupCollection.is_gtp_remat_active(result)
        result["intra_dp_cp_group_gloo"] = (
            parallel_state.get_data_parallel_group_gloo(True, True) if gloo else None
        )
        result["intra_expt_dp_group_gloo"] = (
            parallel_state.get_expert_data_parallel_group_gloo(True) if gloo else None
        )
        return result


def _required(groups: ProcessGroupCollection, name: str) -> Any:
    if name not in vars(groups):
        raise ValueError(
            f"{name} process group is required but not provided in pg_collection; set it, to None if "
            "there is no such group"
        )
    return vars(groups)[name]


def _data_parallel_groups(groups: ProcessGroupCollection, ddp_config: Any) -> dict[str, Any]:
    dp = _required(groups, "dp")
    dp_cp = getattr(groups, "dp_cp", dp)
    expt_dp = getattr(groups, "expt_dp", dp_cp)
    result = {
        "dp_group": dp,
        "dp_cp_group": dp_cp,
        "expt_dp_group": expt_dp,
        "intra_dp_cp_group": dp_cp,
        "intra_expt_dp_group": expt_dp,
        "gtp_remat_group": getattr(groups, "gtp_remat", None),
        "expt_gtp_remat_group": getattr(groups, "expt_gtp_remat", None),
        "inter_dist_opt_group": None,
        "intra_dist_opt_group": None,
    }
    if ddp_config is None:
        return result
    if ddp_config.num_distributed_optimizer_instances > 1:
        for name in ("intra_dp_cp", "intra_expt_dp", "inter_dist_opt"):
            result[f"{name}_group"] = _required(groups, name)
    if ddp_config.use_distributed_optimizer:
        result["intra_dist_opt_group"] = getattr(groups, "intra_dist_opt", None)
    return result


def _no_group() -> None:
    return None


_FROM_PARALLEL_STATE: dict[str, Callable[[], Any]] = {
    "tp": parallel_state.get_tensor_model_parallel_group,
    "pp": parallel_state.get_pipeline_model_parallel_group,
    "mp": parallel_state.get_model_parallel_group,
    "embd": parallel_state.get_embedding_group,
    "pos_embd": parallel_state.get_position_embedding_group,
    "cp": parallel_state.get_context_parallel_group,
    "tp_cp": parallel_state.get_tensor_and_context_parallel_group,
    "hcp": _no_group,
    "ep": parallel_state.get_expert_model_parallel_group,
    "expt_tp": parallel_state.get_expert_tensor_parallel_group,
    "tp_ep": parallel_state.get_expert_tensor_and_model_parallel_group,
    "tp_ep_pp": parallel_state.get_expert_tensor_model_pipeline_parallel_group,
    "tp_ep_pp_with_egtp_remat": partial(
        parallel_state.get_expert_tensor_model_pipeline_parallel_group, with_egtp_remat=True
    ),
    "tp_dp_cp": parallel_state.get_tensor_and_data_parallel_group,
    "dp": partial(parallel_state.get_data_parallel_group, with_gtp_remat=False),
    "dp_cp": partial(parallel_state.get_data_parallel_group, True, False),
    "dp_cp_gtp_remat": partial(parallel_state.get_data_parallel_group, True, True),
    "dp_cp_ag": _no_group,
    "gtp_remat": parallel_state.get_gtp_weight_remat_group,
    "expt_gtp_remat": parallel_state.get_expert_gtp_weight_remat_group,
    "expt_tp_gtp_remat": parallel_state.get_expert_tensor_and_gtp_weight_remat_group,
    "expt_dp": partial(parallel_state.get_expert_data_parallel_group, with_gtp_remat=False),
    "expt_dp_gtp_remat": parallel_state.get_expert_data_parallel_group,
    "expt_dp_ag": _no_group,
    "intra_dp_cp": partial(parallel_state.get_data_parallel_group, True, False, True),
    "intra_expt_dp": partial(
        parallel_state.get_expert_data_parallel_group,
        with_gtp_remat=False,
        partial_expert_data_parallel=True,
    ),
    "inter_dist_opt": parallel_state.get_inter_distributed_optimizer_instance_group,
    "intra_dist_opt": parallel_state.get_intra_distributed_optimizer_instance_group,
}
