//! The tensors of arguments, by name.

use gated_delta::Tensor;
use gated_delta::ops::GdnGates;
use gated_delta::ops::kda_recurrent::{KdaGate, KdaGates};
use gated_delta::ops::recurrent::{Commit, Recurrent};

use crate::args::Args;

/// A tensor of arguments, and its name in error messages.
pub type Named<'a, 'b> = (&'static str, &'b mut Tensor<'a>);

/// The tensor of this name.
///
/// # Panics
/// Where there is none.
pub fn tensor<'a, 'b>(args: &'b mut Args<'a>, name: &str) -> &'b mut Tensor<'a> {
    let named = tensors(args).into_iter().find(|(of, _)| *of == name);
    named.unwrap_or_else(|| panic!("there is no {name}")).1
}

/// Every tensor of the arguments.
pub fn tensors<'a, 'b>(args: &'b mut Args<'a>) -> Vec<Named<'a, 'b>> {
    match args {
        Args::GdnDecode(args) => {
            let mut all = vec![("q", &mut args.q), ("k", &mut args.k), ("v", &mut args.v)];
            all.extend([("o", &mut args.o), ("state", &mut args.pool)]);
            all.extend(gdn(&mut args.gates).0);
            all.extend(given([
                ("write state", &mut args.write_pool),
                ("read_slots", &mut args.read_slots),
                ("write_slots", &mut args.write_slots),
            ]));
            all
        }
        Args::GdnMtp(args) => recurrent(args, gdn),
        Args::KdaRecurrent(args) => recurrent(args, kda),
        Args::GdnCommit(args) => commit(args, gdn),
        Args::KdaCommit(args) => commit(args, kda),
    }
}

/// Those of the gates, and what the previous tokens' are called.
type OfGates<'a, 'b> = (Vec<Named<'a, 'b>>, [&'static str; 2]);

fn recurrent<'a, 'b, G>(
    args: &'b mut Recurrent<'a, G>,
    gates: fn(&'b mut G) -> OfGates<'a, 'b>,
) -> Vec<Named<'a, 'b>> {
    let (mut all, previous_names) = gates(&mut args.gates);
    all.extend([("q", &mut args.q), ("k", &mut args.k), ("v", &mut args.v)]);
    all.extend([("o", &mut args.o), ("state", &mut args.pool)]);
    all.extend(given([
        ("write state", &mut args.write_pool),
        ("read_slots", &mut args.read_slots),
        ("write_slots", &mut args.write_slots),
        ("token_slots", &mut args.token_slots),
        ("accepted", &mut args.accepted),
        ("snapshots", &mut args.snapshots),
    ]));
    let packed = args.packed.as_mut();
    all.extend(packed.map(|packed| ("cu_seqlens", &mut packed.cu_seqlens)));
    if let Some(previous) = &mut args.previous {
        all.extend([
            ("previous k", &mut previous.k),
            ("previous v", &mut previous.v),
            (previous_names[0], &mut previous.gate),
            (previous_names[1], &mut previous.beta),
            ("keep", &mut previous.keep),
        ]);
    }
    all
}

fn commit<'a, 'b, G>(
    args: &'b mut Commit<'a, G>,
    gates: fn(&'b mut G) -> OfGates<'a, 'b>,
) -> Vec<Named<'a, 'b>> {
    let (mut all, _) = gates(&mut args.gates);
    all.extend([("k", &mut args.k), ("v", &mut args.v)]);
    all.extend([("keep", &mut args.keep), ("state", &mut args.pool)]);
    all.extend(given([
        ("write state", &mut args.write_pool),
        ("read_slots", &mut args.read_slots),
        ("write_slots", &mut args.write_slots),
    ]));
    all
}

fn gdn<'a, 'b>(gates: &'b mut GdnGates<'a>) -> OfGates<'a, 'b> {
    match gates {
        GdnGates::Raw {
            a,
            b,
            a_log,
            dt_bias,
            ..
        } => (
            vec![("a", a), ("b", b), ("A_log", a_log), ("dt_bias", dt_bias)],
            ["previous a", "previous b"],
        ),
        GdnGates::Given { g, beta } => (
            vec![("g", g), ("beta", beta)],
            ["previous g", "previous beta"],
        ),
    }
}

fn kda<'a, 'b>(gates: &'b mut KdaGates<'a>) -> OfGates<'a, 'b> {
    let mut all = vec![("g", &mut gates.g), ("beta", &mut gates.beta)];
    match &mut gates.kind {
        KdaGate::Log => {}
        KdaGate::Softplus { a_log, dt_bias } => {
            all.push(("A_log", a_log));
            all.extend(given([("dt_bias", dt_bias)]));
        }
        KdaGate::LowerBound { a_log, dt_bias, .. } => {
            all.extend(given([("A_log", a_log), ("dt_bias", dt_bias)]));
        }
    }
    (all, ["previous g", "previous beta"])
}

fn given<'a, 'b, const N: usize>(
    optional: [(&'static str, &'b mut Option<Tensor<'a>>); N],
) -> impl Iterator<Item = Named<'a, 'b>> {
    optional
        .into_iter()
        .filter_map(|(name, tensor)| Some((name, tensor.as_mut()?)))
}
