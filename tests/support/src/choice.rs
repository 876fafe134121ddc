//! The formulation that the library is expected to choose if the caller names none: a second statement of the rule, from a case's
//! own sizes.

use gated_delta::{DType, Formulation, StateLayout};
use gated_delta_harness::arguments::{Arguments, Operator};

use crate::case::Case;
use crate::problem::Shaped;

/// Whether a launch without a named formulation is a prefill.
pub(crate) fn is_prefill<T: Shaped>(args: &Arguments<T>) -> bool {
    let o = match (&args.new, &args.convolved) {
        (Some(new), _) => &new.o,
        (_, Some(convolved)) => &convolved.o,
        _ => return false,
    };
    let longest = args.packed.as_ref().map(|packed| packed.max_tokens);
    let longest = longest.unwrap_or(o.dims()[1]);
    let has_more =
        args.positions.is_some() || args.checkpoints.is_some() || args.workspace.is_some();
    args.pending.is_none() && (longest > 16 || has_more)
}

/// Largest number of new and of previous tokens of a row, 0 without such tokens.
fn tokens<T: Shaped>(args: &Arguments<T>) -> [usize; 2] {
    let packed = args.packed.as_ref().map(|packed| packed.max_tokens);
    let new = args.new.as_ref().map(|new| &new.o);
    let new = new.or(args.convolved.as_ref().map(|convolved| &convolved.o));
    let new = new.map_or(0, |o| packed.unwrap_or(o.dims()[1]));
    let previous = args.previous.as_ref().map(|kept| &kept.tokens.k);
    let previous = previous.or(args.previous_x.as_ref().map(|kept| &kept.x));
    [new, previous.map_or(0, |tensor| tensor.dims()[1])]
}

/// H of a layer step, which has a convolution or a norm. `None` for other launches.
fn heads_of_layer<T: Shaped>(args: &Arguments<T>) -> Option<usize> {
    let of_commit = args.previous_x.as_ref().and_then(|kept| kept.conv.as_ref());
    let convolved = args.convolved.as_ref().map(|convolved| convolved.heads);
    let convolved = convolved.or(of_commit.map(|conv| conv.heads));
    convolved.or_else(|| {
        args.norm.as_ref()?;
        args.new.as_ref().map(|new| new.q.dims()[2])
    })
}

/// The formulation that the library is expected to choose for a case without a named one.
#[must_use]
pub fn chosen(case: &Case) -> Formulation {
    if is_prefill(&case.args) {
        return Formulation::Chunked;
    }
    let [new, previous] = tokens(&case.args);
    let dtype = |view: &crate::buffer::View| case.buffers[view.buffer].dtype;
    let is_k_last = case.options.state_layout == StateLayout::KLast;
    let k_dim = case.pool.dims[if is_k_last { 3 } else { 2 }];
    let is_f32 = dtype(&case.pool) == DType::F32;
    let is_alone = case.pending.is_none();
    let is_plain = is_alone && heads_of_layer(&case.args).is_none();
    let most_tokens = if is_plain { 16 } else { 8 };
    let least_tokens = match (is_f32, is_k_last) {
        (true, _) => 3,
        (false, false) => 9,
        (false, true) => 0,
    };
    let has_kernels = (k_dim == 128 || k_dim == 64 && case.gates.operator() == Operator::Gdn)
        && match dtype(&case.pool) {
            DType::Bf16 => is_k_last || is_plain,
            DType::F16 => is_k_last && is_alone || is_plain,
            DType::F32 => is_alone,
            _ => false,
        }
        && new.max(previous) >= least_tokens
        && case.snapshots.is_none()
        && case.token_slots.is_none()
        && new.max(previous) <= most_tokens;
    let most = match case.gates.operator() {
        Operator::Kda => 4,
        Operator::Gdn => 8,
    };
    let fits = heads_of_layer(&case.args).is_none_or(|heads| case.pool.dims[1] <= most * heads);
    let is_parallel = match &case.pending {
        None => new.max(previous) > 1 && fits,
        Some(ring) => {
            let drafts = new > 1
                || ring.most > 8
                || dtype(&ring.updates) == DType::Bf16
                || ring.inputs.is_some()
                || ring.windows.is_some();
            drafts || case.convolved.is_none() && ring.keys.dims[2] > ring.most + 1 && fits
        }
    };
    match has_kernels && is_parallel {
        true => Formulation::Parallel,
        false => Formulation::Recurrent,
    }
}

impl Case {
    /// The formulation that computes the case: the named one, or the choice of the library.
    #[must_use]
    pub fn formulation(&self) -> Formulation {
        match self.options.formulation {
            Formulation::Auto => chosen(self),
            named => named,
        }
    }

    /// The same case without a named formulation, if the library is expected to choose the named one.
    pub(crate) fn unnamed(mut self) -> Self {
        if chosen(&self) == self.options.formulation {
            self.options.formulation = Formulation::Auto;
        }
        self
    }
}
