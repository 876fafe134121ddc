//! Plans, and the driver's compilation of the kernels.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::{env, fs};

use gated_delta::{DType, Entry, Error, Formulation, StateLayout, Tensor};
use gated_delta_harness::arguments::{Arguments, Operator};
use gated_delta_test_support::backend::{cuda, cuda_for, of_gpu, on_threads};
use gated_delta_test_support::case::Case;
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

/// Whole layers that spill, and the most bytes of a thread without and with previous tokens. With one block less on a
/// multiprocessor they would not spill, but be slower (docs/lab-notes.md, "Spills that are kept"). Only the driver's compiler
/// spills GDN's bf16 tile128_warps8.
const KEPT_SPILLS: [(Entry, [u32; 2]); 9] = [
    (Entry::gdn_layer_parallel_f32_k128_tile128, [48, 88]),
    (Entry::gdn_layer_parallel_f32_k128_tile128_alone, [28, 24]),
    (
        Entry::gdn_layer_parallel_klast_bf16_k128_tile128_warps8,
        [16, 0],
    ),
    (Entry::kda_layer_parallel_klast_bf16_k128_tile64, [0, 24]),
    (Entry::layer_mtp_klast_bf16_k64_tile64, [0, 8]),
    (Entry::layer_mtp_klast_f32_k64_tile16, [0, 24]),
    (Entry::layer_mtp_klast_f32_k64_tile64, [0, 16]),
    (Entry::layer_mtp_klast_f32_k128_tile32, [0, 32]),
    (Entry::layer_mtp_klast_f32_k128_tile64, [0, 24]),
];

/// A problem whose kernels are compiled.
#[derive(Clone)]
enum Compiled {
    Step(Spec),
    Deferred(deferred::Spec),
}

impl Compiled {
    /// Its form, and its data.
    fn case(&self) -> (String, Case) {
        match self {
            Self::Step(spec) => (format!("{:?}", spec.form), spec.case()),
            Self::Deferred(spec) => (format!("{spec:?}"), spec.problem().case()),
        }
    }
}

/// Every problem of [`every_kernel`] and of deferred write-back, by family or entry.
fn every_form() -> Vec<Vec<Compiled>> {
    let of_family = |of: Vec<Spec>| of.into_iter().map(Compiled::Step).collect();
    let of_entry = |spec: deferred::Spec| {
        let gaps = deferred::Spec {
            io: DType::F32,
            gap: 3,
            ..spec.clone()
        };
        let flush = deferred::Spec {
            tokens: 0,
            ..spec.clone()
        };
        [spec, gaps, flush].map(Compiled::Deferred).into()
    };
    let waiting = deferred::entries().flat_map(|entry| deferred::of_entry(entry, &[0, 8, 5]));
    let steps = every_kernel().into_iter().map(of_family);
    steps.chain(waiting.map(of_entry)).collect()
}

/// Bytes of a thread that a kernel may spill: see [`KEPT_SPILLS`].
fn kept_spills(entry: Entry, constants: &[(&str, u32)]) -> u32 {
    let resumes =
        (constants.iter()).any(|(name, value)| *name == "GD_PREVIOUS_TOKENS" && *value > 0);
    let kept = KEPT_SPILLS.iter().find(|(of, _)| *of == entry);
    kept.map_or(0, |(_, bytes)| bytes[usize::from(resumes)])
}

/// ptxas keeps the kernels that Hopper GPUs with few and with many multiprocessors select in registers, in every form. Runs only
/// if `GATED_DELTA_CUDA_BIN` names the folder of ptxas.
#[test]
fn no_kernel_spills_by_ptxas() {
    let Some(folder) = env::var_os("GATED_DELTA_CUDA_BIN") else {
        println!("SKIPPED: ptxas (GATED_DELTA_CUDA_BIN is not set)");
        return;
    };
    let ptxas = Path::new(&folder).join("ptxas");
    let mut kernels = HashMap::new();
    for (form, case) in every_form().concat().iter().map(Compiled::case) {
        for multiprocessors in [1, 132] {
            let launches = case.nowhere(|work| {
                let recipe = work.recipe_for(multiprocessors, (9, 0)).unwrap();
                recipe.launches().collect::<Vec<_>>()
            });
            for launch in launches {
                kernels.entry(launch.kernel).or_insert(form.clone());
            }
        }
    }
    let kernels: Vec<_> = kernels.into_iter().enumerate().collect();
    let spills = Mutex::new(Vec::new());
    on_threads(&kernels, |(i, (kernel, form))| {
        let (entry, text) = (kernel.entry(), kernel.ptx().unwrap());
        let own = text.lines().find_map(|line| line.strip_prefix(".target "));
        let arch = own.filter(|target| *target == "sm_90a").unwrap_or("sm_90");
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("spills-{i}"));
        fs::write(&file, &text).unwrap();
        let mut command = Command::new(&ptxas);
        let out = command
            .args(["-v", "-arch", arch, "-o", "/dev/null"])
            .arg(&file);
        let out = out.output().unwrap();
        fs::remove_file(&file).unwrap();
        let said = String::from_utf8_lossy(&out.stderr) + String::from_utf8_lossy(&out.stdout);
        let frame = said.split_once(" bytes stack frame");
        let bytes = frame.and_then(|(before, _)| before.split_whitespace().last()?.parse().ok());
        let bytes: u32 = bytes.unwrap_or_else(|| panic!("{}: {said}", entry.name()));
        let constants: Vec<_> = kernel.constants().collect();
        if bytes > kept_spills(entry, &constants) {
            let spill = format!("{bytes} bytes: {} {form} with {constants:?}", entry.name());
            spills.lock().unwrap().push(spill);
        }
    });
    let spills = spills.into_inner().unwrap();
    assert!(spills.is_empty(), "{}", spills.join("\n"));
    println!("{} kernels", kernels.len());
}

/// The driver's compiler keeps every variant for this GPU in registers, without spills except those of [`KEPT_SPILLS`]. The GPU
/// takes a share of the forms, at least one of each family or entry; neighbouring ones have different forms.
#[test]
fn no_kernel_spills() {
    let Some(backend) = cuda() else { return };
    // Entries of a prefill for other GPUs too.
    let elsewhere = cuda_for(Entry::gdn_prefill_chain_k128_tile64_mma);
    let forms = every_form().into_iter().enumerate();
    let taken: Vec<_> = forms.flat_map(|(i, of)| of_gpu(of, i)).collect();
    on_threads(&taken, |of| {
        let (form, case) = of.case();
        let is_prefill = case.formulation() == Formulation::Chunked;
        let elsewhere = elsewhere.filter(|_| is_prefill);
        for backend in [Some(backend), elsewhere].into_iter().flatten() {
            let resources = backend.with(&case, |library, _, args| {
                let work = args.work()?;
                let kernel = work.recipe()?.kernel;
                let constants: Vec<_> = kernel.constants().collect();
                Ok::<_, Error>((library.resources(&*work)?, constants))
            });
            let (resources, constants) = resources.unwrap().0.unwrap();
            for (entry, resources) in resources {
                println!("{} {form}: {resources:?}", entry.name());
                assert!(
                    resources.local_bytes <= kept_spills(entry, &constants),
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
