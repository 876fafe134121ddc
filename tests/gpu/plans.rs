//! Plans, and what the driver's compiler makes of the kernels.

use gated_delta::ops::StateLayout;
use gated_delta::{DType, Error};
use gated_delta_tests::args::{Args, Plan};
use gated_delta_tests::backend::cuda;
use gated_delta_tests::compare::check;
use gated_delta_tests::layout::Spacing;
use gated_delta_tests::problem::Operator;
use gated_delta_tests::spec::{Family, Spec};

use crate::{families, spec};

#[test]
fn a_plan_is_the_operator_bit_for_bit() {
    let Some(backend) = cuda() else { return };
    for family in families() {
        for spacing in [Spacing::Dense, Spacing::Odd] {
            let mut spec = spec(family);
            (spec.form.io, spec.form.pools) = (spacing, spacing);
            let case = spec.case();
            let planned = backend.with(&case, |library, stream, args| {
                let plan = args.plan(library).unwrap();
                // SAFETY: the buffers are alive until `with` has waited; the plan is of these arguments.
                unsafe { plan.launch(stream, spec.batch, args) }.unwrap();
            });
            assert!(
                planned.unwrap().1 == backend.run(&case, None),
                "{family:?}: the plan differs"
            );
        }
    }
}

/// A decode, and a launch with new and previous tokens and one with snapshots, aligned or not.
fn specs(spacing: Spacing) -> [Spec; 3] {
    let spec = |family: Family| {
        let mut spec = spec(family);
        (spec.form.io, spec.form.pools) = (spacing, spacing);
        spec
    };
    [
        spec(Family::new(
            Operator::GdnDecode,
            StateLayout::KLast,
            DType::Bf16,
            128,
        )),
        Spec {
            previous: Some(2),
            ..spec(Family::new(
                Operator::KdaRecurrent,
                StateLayout::KLast,
                DType::Bf16,
                128,
            ))
        },
        Spec {
            snapshots: Some(1),
            ..spec(Family::new(
                Operator::GdnMtp,
                StateLayout::VLast,
                DType::Bf16,
                128,
            ))
        },
    ]
}

/// A plan for aligned tensors refuses an address that is not, by name.
#[test]
fn a_plan_refuses_misaligned_addresses() {
    let Some(backend) = cuda() else { return };
    for spec in specs(Spacing::Dense) {
        let case = spec.case();
        let (_, after) = backend
            .with(&case, |library, stream, args| {
                let plan = args.plan(library).unwrap();
                match (&plan, args) {
                    (Plan::Decode(plan), Args::GdnDecode(args)) => refuses(
                        &args.params(),
                        &[
                            ("q", |params, by| params.q += by),
                            ("k", |params, by| params.k += by),
                            ("v", |params, by| params.v += by),
                            ("o", |params, by| params.o += by),
                            ("state", |params, by| params.read_pool += by),
                            ("write state", |params, by| params.write_pool += by),
                        ],
                        // SAFETY: it is refused, or nothing is launched for no rows.
                        |batch, params| unsafe { plan.launch(stream, batch, params) },
                    ),
                    (Plan::Recurrent(plan), Args::GdnMtp(args)) => refuses(
                        &args.params(),
                        &[
                            ("q", |params, by| params.q += by),
                            ("o", |params, by| params.o += by),
                            ("read_pool", |params, by| params.read_pool += by),
                            ("write_pool", |params, by| params.write_pool += by),
                            ("snapshots", |params, by| params.snapshots += by),
                        ],
                        // SAFETY: as above.
                        |batch, params| unsafe { plan.launch(stream, batch, params) },
                    ),
                    (Plan::Recurrent(plan), Args::KdaRecurrent(args)) => refuses(
                        &args.params(),
                        &[
                            ("k", |params, by| params.k += by),
                            ("v", |params, by| params.v += by),
                            ("previous_k", |params, by| params.previous_k += by),
                            ("previous_v", |params, by| params.previous_v += by),
                            ("g", |params, by| params.g += by),
                            ("previous_g", |params, by| params.previous_g += by),
                            ("dt_bias", |params, by| params.dt_bias += by),
                        ],
                        // SAFETY: as above.
                        |batch, params| unsafe { plan.launch(stream, batch, params) },
                    ),
                    _ => panic!("a plan of another operator"),
                }
            })
            .unwrap();
        assert!(after == case, "something was launched");
    }
}

/// Adds some bytes to one address.
type Misalign<P> = fn(&mut P, u64);

/// `launch` refuses each address of `good` that is not aligned, and too many rows; of no rows there is nothing to do.
fn refuses<P: Copy>(
    good: &P,
    addresses: &[(&str, Misalign<P>)],
    launch: impl Fn(usize, &P) -> Result<(), Error>,
) {
    for (name, misalign) in addresses {
        for by in [4, 8] {
            let mut params = *good;
            misalign(&mut params, by);
            let error = launch(4, &params).unwrap_err().to_string();
            let wanted = format!("{name}: wanted an alignment of 16 bytes, got {by}");
            assert_eq!(error, wanted);
        }
    }
    let error = launch(65_536, good).unwrap_err().to_string();
    assert!(
        error.starts_with("B: wanted at most 65535, got 65536"),
        "{error}"
    );
    launch(0, good).unwrap();
}

/// A plan for tensors that are not aligned takes any address.
#[test]
fn a_plan_for_misaligned_tensors_takes_them() {
    let Some(backend) = cuda() else { return };
    for spec in specs(Spacing::Odd) {
        let case = spec.case();
        let planned = backend.with(&case, |library, stream, args| {
            let plan = args.plan(library).unwrap();
            // SAFETY: the buffers are alive until `with` has waited; the plan is of these arguments.
            unsafe { plan.launch(stream, 4, args) }.unwrap();
        });
        check(&case, &planned.unwrap().1);
    }
}

/// What the driver's compiler makes of every variant for this GPU keeps everything in registers.
#[test]
fn no_kernel_spills() {
    let Some(backend) = cuda() else { return };
    for family in families() {
        for spacing in [Spacing::Dense, Spacing::Odd] {
            for element in [DType::F32, DType::Bf16, DType::F16] {
                let mut spec = spec(family);
                (spec.form.io, spec.form.pools) = (spacing, spacing);
                (spec.form.qkvo, spec.form.gates) = ([element; 4], [element; 2]);
                let mut specs = vec![spec.clone()];
                if family.max_tokens() > 1 {
                    let tokens = family.max_tokens();
                    specs.extend([1, tokens].map(|tokens| Spec {
                        tokens,
                        ..spec.clone()
                    }));
                    specs.push(Spec {
                        previous: Some(tokens),
                        tokens,
                        ..spec
                    });
                }
                for spec in specs {
                    let resources = backend.with(&spec.case(), |library, _, args| match args {
                        Args::GdnDecode(args) => library.gdn_decode_resources(args),
                        Args::GdnMtp(args) => library.gdn_mtp_resources(args),
                        Args::KdaRecurrent(args) => library.kda_recurrent_resources(args),
                        _ => panic!("a commit"),
                    });
                    for (entry, resources) in resources.unwrap().0.unwrap() {
                        println!("{} {element} {spacing:?}: {resources:?}", entry.name());
                        assert_eq!(resources.local_bytes, 0, "{}", entry.name());
                        assert!(
                            resources.registers <= 65_536 / entry.block(),
                            "{}",
                            entry.name()
                        );
                    }
                }
            }
        }
    }
}
