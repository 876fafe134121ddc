//! Plans, and the driver's compilation of the kernels.

use gated_delta::{DType, Entry, Error, Formulation, StateLayout, Tensor};
use gated_delta_harness::arguments::{Arguments, Operator};
use gated_delta_test_support::backend::{cuda, cuda_for, of_gpu, on_threads};
use gated_delta_test_support::compare::check;
use gated_delta_test_support::deferred;
use gated_delta_test_support::layout::Spacing;
use gated_delta_test_support::spec::{Family, Spec};
use gated_delta_test_support::variants;

use crate::launches::spec;

/// A decode, a launch with new and previous tokens, and one with snapshots, with these gaps.
fn specs(spacing: Spacing) -> [Spec; 3] {
    let spec = |family: Family| {
        let mut spec = spec(family);
        (spec.form.io, spec.form.pools) = (spacing, spacing);
        spec
    };
    [
        spec(Family::decode(StateLayout::KLast, DType::Bf16, 128)),
        Spec {
            previous: Some(2),
            ..spec(Family::new(
                Operator::Kda,
                StateLayout::KLast,
                DType::Bf16,
                128,
            ))
        },
        Spec {
            snapshots: Some(1),
            ..spec(Family::new(
                Operator::Gdn,
                StateLayout::VLast,
                DType::Bf16,
                128,
            ))
        },
    ]
}

/// A plan for aligned tensors refuses an unaligned address by the tensor's name. It also refuses too many rows.
#[test]
fn a_plan_refuses_misaligned_addresses() {
    let Some(backend) = cuda() else { return };
    for spec in specs(Spacing::Dense) {
        let case = spec.case();
        let (_, after) = backend
            .with(&case, |library, stream, args| {
                let plan = library.plan(&*args.work().unwrap()).unwrap();
                let launch = |args: &Arguments<Tensor<'_>>| {
                    let work = args.work().unwrap();
                    // SAFETY: the plan refuses the launch.
                    let refused = unsafe { plan.launch(stream, &*work) };
                    refused.unwrap_err().to_string()
                };
                for (i, name) in wide(&mut args.clone()) {
                    for by in [4, 8] {
                        let mut args = *args;
                        let tensor = &mut *args.tensors_mut()[i].1;
                        let (address, dtype) = (tensor.address() + by, tensor.dtype());
                        let (dims, strides) = (tensor.dims().to_vec(), tensor.strides().to_vec());
                        // SAFETY: the plan refuses the tensor.
                        let misaligned = unsafe { Tensor::from_raw(address, dtype, &dims) };
                        *tensor = misaligned.unwrap().with_strides(&strides).unwrap();
                        let wanted = format!("{name}: wanted an alignment of 16 bytes, got {by}");
                        assert_eq!(launch(&args), wanted);
                    }
                }
                let error = plan.raw(65_536).unwrap_err().to_string();
                assert!(
                    error.starts_with("B: wanted at most 65535, got 65536"),
                    "{error}"
                );
            })
            .unwrap();
        assert!(after == case, "something was launched");
    }
}

/// Positions and names of the tensors with wide accesses.
fn wide(args: &mut Arguments<Tensor<'_>>) -> Vec<(usize, &'static str)> {
    let per_channel = args.gates.operator() == Operator::Kda;
    let names = args.tensors_mut().into_iter().map(|(name, _)| name);
    let is_wide = |name: &str| match name {
        "q" | "k" | "v" | "o" | "previous k" | "previous v" => true,
        "pool" | "write_pool" | "snapshots" => true,
        "g" | "previous g" | "dt_bias" => per_channel,
        _ => false,
    };
    names
        .enumerate()
        .filter(|(_, name)| is_wide(name))
        .collect()
}

/// A plan for unaligned tensors takes any address.
#[test]
fn a_plan_for_misaligned_tensors_takes_them() {
    let Some(backend) = cuda() else { return };
    for spec in specs(Spacing::Odd) {
        let case = spec.case();
        let planned = backend.with(&case, |library, stream, args| {
            let work = args.work().unwrap();
            let plan = library.plan(&*work).unwrap();
            // SAFETY: the buffers are alive until `with` has waited; the plan is of these arguments.
            unsafe { plan.launch(stream, &*work) }.unwrap();
        });
        check(&case, &planned.unwrap().1);
    }
}

/// Every family with wide and narrow accesses, with few tokens and with the most that a block has room for. Each combination has
/// one of the dtypes, other ones in neighbouring families. `cargo xtask ptx` assembles every entry in more forms.
fn every_kernel() -> Vec<Vec<Spec>> {
    // The most T + T' with HV / H = 2. V-last KDA has room for no more, K-last layers with f32 states of 96 × 192 for fewer.
    let most = |family: Family| {
        let of_few = (true, StateLayout::KLast, DType::F32, 96);
        match (family.layer, family.layout, family.state, family.dim) == of_few {
            true => 21,
            false => 30,
        }
    };
    let mut all = Vec::new();
    for (i, family) in Family::all().into_iter().enumerate() {
        let form = |turn: usize| {
            let element = [DType::F32, DType::Bf16, DType::F16][(i + turn) % 3];
            let spacing = [Spacing::Dense, Spacing::Odd][turn % 2];
            let mut spec = spec(family);
            (spec.form.io, spec.form.pools) = (spacing, spacing);
            (spec.form.qkvo, spec.form.gates) = ([element; 4], [element; 2]);
            spec
        };
        let mut of_family = vec![form(0), form(1)];
        if !family.decode {
            let tokens = family.max_tokens();
            of_family.push(Spec { tokens, ..form(2) });
            let previous = Some(tokens.min(most(family) - tokens));
            let resumed = [form(3), form(4)].map(|of| Spec {
                previous,
                tokens,
                ..of
            });
            of_family.extend(resumed);
            if family.dim == 96 {
                // Layers of this family have HV = H, and room for all tokens.
                of_family.push(Spec {
                    previous: Some(tokens),
                    tokens,
                    ratio: 1,
                    ..form(5)
                });
            }
        }
        all.push(of_family);
    }
    all
}

/// Every problem whose compilation is tested below has a kernel.
#[test]
fn every_kernel_has_room() {
    // Without a GPU the variants are enough.
    if cuda().is_none() {
        return;
    }
    on_threads(&every_kernel().concat(), |spec| {
        assert!(!variants(&spec.case()).is_empty(), "{spec:?}");
    });
}

/// Whole layers that spill, and the most bytes of a thread without and with previous tokens: one block less on a multiprocessor, which would
/// have the registers, is slower (docs/lab-notes.md, "Spills that are kept").
const KEPT_SPILLS: [(Entry, [u32; 2]); 6] = [
    (Entry::gdn_layer_parallel_f32_k128_tile128, [48, 88]),
    (Entry::gdn_layer_parallel_f32_k128_tile128_alone, [28, 24]),
    (Entry::kda_layer_parallel_klast_bf16_k128_tile64, [0, 24]),
    (Entry::layer_mtp_klast_f32_k64_tile16, [0, 24]),
    (Entry::layer_mtp_klast_f32_k128_tile32, [0, 32]),
    (Entry::layer_mtp_klast_f32_k128_tile64, [0, 24]),
];

/// The driver's compiler keeps every variant for this GPU in registers, without spills but those of [`KEPT_SPILLS`]. The GPU takes a share of the forms: other ones
/// of neighbouring families and entries, and one of each at least.
#[test]
fn no_kernel_spills() {
    let Some(backend) = cuda() else { return };
    // Entries of a prefill for other GPUs too.
    let elsewhere = cuda_for(Entry::gdn_prefill_chain_k128_tile64_mma);
    let forms = every_kernel().into_iter().enumerate();
    let forms = forms.flat_map(|(i, of_family)| of_gpu(of_family, i));
    let forms = forms.map(|spec| (format!("{:?}", spec.form), spec.case()));
    let waiting = deferred::entries()
        .flat_map(|entry| deferred::of_entry(entry, &[0, 8, 5]))
        .enumerate()
        .flat_map(|(i, spec)| {
            let gaps = deferred::Spec {
                io: DType::F32,
                gap: 3,
                ..spec.clone()
            };
            let flush = deferred::Spec {
                tokens: 0,
                ..spec.clone()
            };
            let forms = of_gpu(vec![spec, gaps, flush], i).into_iter();
            forms.map(|spec| (format!("{spec:?}"), spec.problem().case()))
        });
    let cases: Vec<_> = forms.chain(waiting).collect();
    on_threads(&cases, |(form, case)| {
        let is_prefill = case.formulation() == Formulation::Chunked;
        let elsewhere = elsewhere.filter(|_| is_prefill);
        for backend in [Some(backend), elsewhere].into_iter().flatten() {
            let resources = backend.with(case, |library, _, args| {
                let work = args.work()?;
                let kernel = work.recipe()?.kernel;
                let constants: Vec<_> = kernel.constants().collect();
                Ok::<_, Error>((library.resources(&*work)?, constants))
            });
            let (resources, constants) = resources.unwrap().0.unwrap();
            let resumes =
                (constants.iter()).any(|(name, value)| *name == "GD_PREVIOUS_TOKENS" && *value > 0);
            for (entry, resources) in resources {
                println!("{} {form}: {resources:?}", entry.name());
                let kept = KEPT_SPILLS.iter().find(|(of, _)| *of == entry);
                let most = kept.map_or(0, |(_, bytes)| bytes[usize::from(resumes)]);
                assert!(
                    resources.local_bytes <= most,
                    "{} {form}: {resources:?} with {constants:?}",
                    entry.name()
                );
                assert!(
                    resources.registers <= 65_536 / entry.block(),
                    "{}",
                    entry.name()
                );
            }
        }
    });
}
