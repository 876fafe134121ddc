//! Plans, and what the driver's compiler makes of the kernels.

use gated_delta::DType;
use gated_delta::ops::gdn_decode::GdnDecodeParams;
use gated_delta_tests::backend::cuda;
use gated_delta_tests::compare::check;
use gated_delta_tests::layout::Spacing;
use gated_delta_tests::spec::Family;

use crate::spec;

#[test]
fn a_plan_is_the_operator_bit_for_bit() {
    let Some(backend) = cuda() else { return };
    for family in Family::all() {
        for spacing in [Spacing::Dense, Spacing::Odd] {
            let mut spec = spec(family);
            (spec.form.io, spec.form.pools) = (spacing, spacing);
            let case = spec.case();
            let planned = backend.with(&case, |library, stream, args| {
                let plan = library.plan_gdn_decode(args).unwrap();
                // SAFETY: the buffers are alive until `with` has waited; the plan is of these arguments.
                unsafe { plan.launch(stream, spec.batch, &args.params()) }.unwrap();
            });
            assert!(
                planned.unwrap().1 == backend.run(&case, None),
                "{family:?}: the plan differs"
            );
        }
    }
}

/// A plan for aligned tensors refuses an address that is not, by name; one for others takes it.
#[test]
fn a_plan_refuses_misaligned_addresses() {
    let Some(backend) = cuda() else { return };
    let mut spec = spec(Family {
        dim: 128,
        ..Family::all().next().unwrap()
    });
    let case = spec.case();
    let (_, after) = backend
        .with(&case, |library, stream, args| {
            let plan = library.plan_gdn_decode(args).unwrap();
            let good = args.params();
            for (name, change) in [
                ("q", (|params| params.q += 2) as fn(&mut GdnDecodeParams)),
                ("k", |params| params.k += 4),
                ("v", |params| params.v += 8),
                ("o", |params| params.o += 2),
                ("state", |params| params.read_pool += 4),
                ("write state", |params| params.write_pool += 8),
            ] {
                let mut params = good;
                change(&mut params);
                // SAFETY: it is refused.
                let error = unsafe { plan.launch(stream, 4, &params) }
                    .unwrap_err()
                    .to_string();
                assert!(
                    error.starts_with(&format!("{name}: wanted an alignment of 16 bytes, got ")),
                    "{error}"
                );
            }
            // SAFETY: it is refused.
            let error = unsafe { plan.launch(stream, 65_536, &good) }
                .unwrap_err()
                .to_string();
            assert!(
                error.starts_with("B: wanted at most 65535, got 65536"),
                "{error}"
            );
            // SAFETY: nothing is launched for no rows.
            unsafe { plan.launch(stream, 0, &good) }.unwrap();
        })
        .unwrap();
    assert!(after == case, "something was launched");

    (spec.form.io, spec.form.pools) = (Spacing::Odd, Spacing::Odd);
    let case = spec.case();
    let planned = backend.with(&case, |library, stream, args| {
        let plan = library.plan_gdn_decode(args).unwrap();
        // SAFETY: the buffers are alive until `with` has waited; the plan is of these arguments.
        unsafe { plan.launch(stream, 4, &args.params()) }.unwrap();
    });
    check(&case, &planned.unwrap().1);
}

/// What the driver's compiler makes of every variant for this GPU keeps everything in registers.
#[test]
fn no_kernel_spills() {
    let Some(backend) = cuda() else { return };
    for family in Family::all() {
        for spacing in [Spacing::Dense, Spacing::Odd] {
            for element in [DType::F32, DType::Bf16, DType::F16] {
                let mut spec = spec(family);
                (spec.form.io, spec.form.pools) = (spacing, spacing);
                (spec.form.qkvo, spec.form.gates) = ([element; 4], [element; 2]);
                let resources = backend.with(&spec.case(), |library, _, args| {
                    library.gdn_decode_resources(args)
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
