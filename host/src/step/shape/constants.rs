//! The load-time constants of a checked request.

use gated_delta_kernels::constants::{Element, Index};
use gated_delta_kernels::machine;
use gated_delta_kernels::prefill::split::Pass;
use gated_delta_kernels::step::StepConstants;

use super::Shape;
use crate::step::args::{Convolution, Formulation, HeadMap, Inputs, Norm, Pending, StateLayout};
use crate::step::argument::Argument;
use crate::step::request::Request;
use crate::tensor::DType;
use crate::tensor_checks::Named;

fn flag(on: bool) -> u32 {
    on as u32
}

/// The kernels' code of an index tensor's dtype.
fn index(tensor: Option<Named<'_>>) -> u32 {
    (match tensor.map(|named| named.tensor.dtype()) {
        None => Index::None,
        Some(DType::I64) => Index::I64,
        Some(DType::U32) => Index::U32,
        Some(_) => Index::I32,
    }) as u32
}

/// The kernels' code of a float dtype. Other dtypes were refused by the checks.
fn element(tensor: Option<Named<'_>>) -> u32 {
    (match tensor.map(|named| named.tensor.dtype()) {
        Some(DType::Bf16) => Element::Bf16,
        Some(DType::F16) => Element::F16,
        _ => Element::F32,
    }) as u32
}

/// The load-time constants of a request with these results of the checks.
pub fn of(request: &Request<'_>, found: &Shape) -> StepConstants {
    let (heads, gates, options) = (&found.extents.heads, &request.gates, request.options);
    let (new, previous) = (&request.new_tokens(), &request.previous_tokens());
    let [q, k, v] = match (new.map(|new| new.inputs), previous) {
        (Some(inputs @ Inputs::Qkv { .. }), _) => inputs.named().map(Some),
        (None, Some(previous)) => {
            let [k, v] = previous.inputs.kv();
            [None, k, v]
        }
        _ => [None; 3],
    };
    let tokens_gates = match (new, previous) {
        (Some(new), _) => new.gates.map(Some),
        (None, Some(previous)) => previous.gates.map(Some),
        (None, None) => [None; 2],
    };
    let (conv, norm) = (request.conv(), request.norm);
    let pending = request.pending.map(Pending::named);
    let of_conv = &found.convolution;
    let update = !request.read_only && previous.is_none() && !request.has(Argument::TokenSlots);
    StepConstants {
        h: heads.h as u32,
        ratio: heads.ratio as u32,
        tiled: flag(options.head_map == HeadMap::Tiled),
        l2norm: flag(options.qk_l2norm),
        scale: new.as_ref().map_or(0, |_| found.scale.to_bits()),
        gate: gates.kind as u32,
        lower_bound: gates.lower_bound.unwrap_or(0.0).to_bits(),
        has_a_log: flag(request.has(Argument::ALog)),
        has_dt_bias: flag(request.has(Argument::DtBias)),
        gate_rows_h: flag(found.gates.are_h),
        beta_logit: flag(gates.beta_logit),
        beta_scale: gates.beta_scale.to_bits(),
        tokens: match request.is_chunked() {
            true => 0,
            false => found.extents.new.tokens as u32,
        },
        previous_tokens: found.extents.previous.tokens as u32,
        update_state: flag(update),
        has_snapshots: flag(request.has(Argument::Snapshots)),
        null_slot: found.null_slot,
        read_index: index(request.get(Argument::ReadSlots)),
        write_index: index(request.get(Argument::WriteSlots)),
        token_index: index(request.get(Argument::TokenSlots)),
        accepted_index: index(request.get(Argument::Accepted)),
        cu_seqlens_index: index(request.get(Argument::CuSeqlens)),
        keep_index: index(previous.as_ref().map(|previous| previous.keep)),
        q_element: element(q),
        k_element: element(k),
        v_element: element(v),
        o_element: element(new.as_ref().map(|new| new.o)),
        g_element: element(tokens_gates[0]),
        b_element: element(tokens_gates[1]),
        wide_io: flag(!found.narrow_io()),
        wide_state: flag(!found.states.narrow),
        q_row: found.new.q.row,
        q_token: found.new.q.token,
        q_head: found.new.q.head,
        k_row: found.new.k.row,
        k_token: found.new.k.token,
        k_head: found.new.k.head,
        v_row: found.new.v.row,
        v_token: found.new.v.token,
        v_head: found.new.v.head,
        o_row: found.new.o.row,
        o_token: found.new.o.token,
        o_head: found.new.o.head,
        g_row: found.new.gate.row,
        g_token: found.new.gate.token,
        g_head: found.new.gate.head,
        b_row: found.new.beta.row,
        b_token: found.new.beta.token,
        previous_k_row: found.previous.k.row,
        previous_k_token: found.previous.k.token,
        previous_k_head: found.previous.k.head,
        previous_v_row: found.previous.v.row,
        previous_v_token: found.previous.v.token,
        previous_v_head: found.previous.v.head,
        previous_g_row: found.previous.gate.row,
        previous_g_token: found.previous.gate.token,
        previous_g_head: found.previous.gate.head,
        previous_b_row: found.previous.beta.row,
        previous_b_token: found.previous.beta.token,
        read_slot: found.states.read_slot,
        write_slot: found.states.write_slot,
        snapshot_row: found.states.snapshot_row,
        snapshot_token: found.states.snapshot_token,
        token_slots_row: found.states.token_slots_row,
        fresh_index: index(request.get(Argument::Fresh)),
        taps: of_conv.taps,
        conv_activation: conv.map_or(0, |conv| conv.activation.code()),
        has_conv_bias: flag(conv.is_some_and(|conv| conv.bias.is_some())),
        x_element: element(request.windows().map(|[read, _]| read)),
        conv_weight_element: element(conv.map(Convolution::named_weight)),
        conv_bias_element: element(conv.and_then(Convolution::named_bias)),
        wide_conv_weight: flag(of_conv.wide_weight),
        x_row: of_conv.x.row,
        x_token: of_conv.x.token,
        conv_weight_channel: of_conv.weight_channel,
        read_windows_slot: of_conv.read.slot,
        read_windows_channel: of_conv.read.channel,
        read_windows_input: of_conv.read.input,
        write_windows_slot: of_conv.write.slot,
        write_windows_channel: of_conv.write.channel,
        write_windows_input: of_conv.write.input,
        previous_x_row: found.previous.x.row,
        previous_x_token: found.previous.x.token,
        has_window_snapshots: flag(request.has(Argument::WindowSnapshots)),
        window_snapshot_row: of_conv.snapshots.row,
        window_snapshot_token: of_conv.snapshots.token,
        window_snapshot_channel: of_conv.snapshots.channel,
        window_snapshot_input: of_conv.snapshots.input,
        has_norm: flag(norm.is_some()),
        norm_activation: norm.map_or(0, |norm| norm.activation.code()),
        norm_eps: norm.map_or(0, |norm| norm.eps.to_bits()),
        z_element: element(norm.map(Norm::named_z)),
        norm_weight_element: element(norm.map(Norm::named_weight)),
        wide_norm: flag(found.norm.wide),
        z_row: found.norm.z.row,
        z_token: found.norm.z.token,
        z_head: found.norm.z.head,
        positions_index: index(request.get(Argument::Positions)),
        checkpoint_index: index(request.get(Argument::CheckpointSlots)),
        checkpoint_every: request.checkpoint_every() as u32,
        split: match request.is_chunked() {
            true => options.split.unwrap_or(0),
            false => 0,
        },
        // Every launch sets its own pass.
        pass: Pass::Output as u32,
        pending: found.rings.most,
        ring: found.rings.entries,
        keys_element: element(pending.map(|[keys, ..]| keys)),
        keys_slot: found.rings.keys_slot,
        updates_element: element(pending.map(|[_, updates, ..]| updates)),
        updates_slot: found.rings.updates_slot,
        decays_slot: found.rings.decays_slot,
        inputs_slot: found.rings.inputs_slot,
        pending_len_index: index(pending.map(|[.., len, _]| len)),
        pending_base_index: index(pending.map(|[.., base]| base)),
        state_f16: flag(request.pool().tensor.dtype() == DType::F16),
        state_f32: flag(
            request.formulation != Formulation::Recurrent
                && request.pool().tensor.dtype() == DType::F32,
        ),
        state_v_last: flag(
            request.formulation != Formulation::Recurrent
                && options.state_layout == StateLayout::VLast,
        ),
        per_channel: flag(gates.per_channel),
        // The machine that the thresholds were measured on. `Problem::on` sets the machine of another GPU.
        machine: if request.is_chunked() {
            machine::HOPPER
        } else {
            0
        },
        reserved: 0,
        // `Problem::on` sets the number.
        blocks_per_sm: 0,
    }
}
