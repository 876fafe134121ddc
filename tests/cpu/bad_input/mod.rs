//! Arguments that break a rule. The error names the tensor, the rule and the given value, and nothing is launched.

mod rules;
mod views;

use std::cell::Cell;

use gated_delta::{DType, Entry, Error, StateLayout, Tensor};
use gated_delta_harness::arguments::{Arguments, Operator};
use gated_delta_test_support::backend::{Backend, backends, launch, simulator};
use gated_delta_test_support::buffer::{Buffer, View};
use gated_delta_test_support::case::Case;
use gated_delta_test_support::compare::check;
use gated_delta_test_support::layout::Layout;
use gated_delta_test_support::problem::{Change, Sizes};
use gated_delta_test_support::slots::SlotChoice;
use gated_delta_test_support::spec::{Family, Spec};
use gated_delta_test_support::variants;

use rules::{Rule, decode, kda, tensor_of, verify};

/// Valid arguments, the rules that they keep, and the names of the tensors that they write.
struct Good {
    case: Case,
    rules: Vec<Rule>,
    writes: &'static [&'static str],
}

/// Arguments of a family with B = 2, H = 2, HV = 4, K = V = 64, P = 5.
fn good(
    family: Family,
    change: impl Fn(&mut Spec),
    rules: Vec<Rule>,
    writes: &'static [&'static str],
) -> Good {
    let mut spec = Spec::plain(family);
    spec.slots = SlotChoice {
        write_pool: Some(0),
        ..SlotChoice::LIVE
    };
    change(&mut spec);
    let case = spec.case();
    Good {
        case,
        rules,
        writes,
    }
}

/// Valid arguments of every operator. Each optional tensor is in at least one of them.
fn goods() -> Vec<Good> {
    let (in_f32, in_bf16) = (
        Family::new(Operator::Gdn, StateLayout::KLast, DType::F32, 64),
        Family::new(Operator::Gdn, StateLayout::KLast, DType::Bf16, 64),
    );
    let of_kda = Family::new(Operator::Kda, StateLayout::KLast, DType::F32, 64);
    let token_slots = SlotChoice {
        spare: 3,
        inactive: false,
        ..SlotChoice::OF_TOKENS
    };
    vec![
        good(
            Family::decode(StateLayout::KLast, DType::F32, 64),
            |_| {},
            decode::rules(),
            &["o", "write_pool"],
        ),
        good(
            Family::decode(StateLayout::KLast, DType::F32, 64),
            |spec| spec.slots.write_pool = None,
            Vec::new(),
            &["o", "pool"],
        ),
        good(
            in_f32,
            |spec| spec.snapshots = Some(1),
            verify::of_snapshots(),
            &["o", "write_pool", "snapshots"],
        ),
        Good {
            case: {
                let spec = Spec {
                    slots: token_slots,
                    ..Spec::plain(in_f32)
                };
                spec.problem().packed().case(&spec.form)
            },
            rules: verify::of_token_slots(),
            writes: &["o", "pool"],
        },
        good(
            in_bf16,
            |spec| spec.previous = Some(9),
            verify::of_previous(),
            &["o", "write_pool"],
        ),
        good(
            in_f32,
            |spec| (spec.previous, spec.tokens) = (Some(9), 0),
            verify::of_commit(),
            &["write_pool"],
        ),
        good(
            of_kda,
            |spec| spec.previous = Some(2),
            kda::rules(),
            &["o", "write_pool"],
        ),
        good(
            of_kda,
            |spec| (spec.previous, spec.tokens, spec.slots.write_pool) = (Some(2), 0, None),
            kda::of_commit(),
            &["pool"],
        ),
    ]
}

/// Launches `args` and returns the error.
fn refused(
    backend: &Backend,
    case: &Case,
    change: impl Fn(&mut Arguments<Tensor<'_>>),
    variant: Option<Entry>,
) -> Error {
    let (result, after) = backend
        .with(case, |library, stream, args| {
            let mut args = *args;
            change(&mut args);
            // SAFETY: the arguments are refused, or their buffers are alive until `with` has waited.
            unsafe { launch(library, stream, &args, variant) }
        })
        .unwrap();
    assert!(after == *case, "something was launched");
    result.unwrap_err()
}

#[test]
fn the_good_arguments_are_good() {
    for Good { case, .. } in goods() {
        for backend in backends() {
            check(&case, &backend.run(&case, None));
        }
    }
}

/// The error of each broken rule names the tensor, the rule and the given value.
#[test]
fn broken_rules_are_refused_by_name() {
    for Good { case, rules, .. } in goods() {
        for backend in backends() {
            let variant = variants(&case)[0];
            for rule in &rules {
                for variant in [None, Some(variant)] {
                    let error = refused(backend, &case, |args| rule.change(args), variant);
                    rule.assert_names_it(&error.to_string());
                }
            }
        }
    }
}

/// Other functions that take arguments refuse the same arguments as a launch.
#[test]
fn nothing_takes_what_a_launch_refuses() {
    for Good { case, rules, .. } in goods() {
        for backend in backends() {
            for rule in &rules {
                let errors = backend.with(&case, |library, stream, args| {
                    let mut args = *args;
                    rule.change(&mut args);
                    let work = match args.work() {
                        Ok(work) => work,
                        Err(error) => return vec![Err(error)],
                    };
                    vec![
                        library.prewarm(&*work),
                        library.plan(&*work).map(drop),
                        library.validate(stream, &*work).map(drop),
                        work.selected().map(drop),
                        work.variants().map(drop),
                        work.bytes().map(drop),
                        work.recipe().map(drop),
                    ]
                });
                for error in errors.unwrap().0 {
                    rule.assert_names_it(&error.unwrap_err().to_string());
                }
            }
        }
    }
}

#[test]
fn a_variant_of_another_problem_is_refused() {
    for Good { case, .. } in goods() {
        for backend in backends() {
            let variants = variants(&case);
            for &variant in Entry::ALL.iter().filter(|entry| !variants.contains(entry)) {
                let message = refused(backend, &case, |_| {}, Some(variant)).to_string();
                let wanted = format!("variant = {} is not supported", variant.name());
                assert!(message.starts_with(&wanted), "{message}");
            }
        }
    }
}

#[test]
fn a_tensor_in_the_wrong_memory_is_refused() {
    let host = vec![0u64; 64 * 1024];
    for Good { case, .. } in goods() {
        for backend in backends() {
            let (wanted, got) = if backend.name() == "simulator" {
                ("host", "device")
            } else {
                ("device", "host")
            };
            for i in 0..case.args.clone().tensors_mut().len() {
                let name = Cell::new("");
                let error = refused(
                    backend,
                    &case,
                    |args| {
                        let (tensor_name, tensor) = &mut args.tensors_mut()[i];
                        let (dtype, dims) = (tensor.dtype(), tensor.dims());
                        // SAFETY: the arguments are refused.
                        let elsewhere = unsafe {
                            Tensor::from_raw(host.as_ptr().expose_provenance() as u64, dtype, dims)
                        };
                        **tensor = if got == "device" {
                            elsewhere.unwrap()
                        } else {
                            in_host(dtype, dims)
                        };
                        name.set(tensor_name);
                    },
                    None,
                );
                let name = name.get();
                assert_eq!(
                    error.to_string(),
                    format!("{name}: wanted {wanted} memory, got {got} memory")
                );
            }
        }
    }
}

/// A tensor in host memory that is never freed.
fn in_host(dtype: DType, dims: &[usize]) -> Tensor<'static> {
    let buffer = Buffer::new(dtype, dims.iter().product());
    let strides = (0..dims.len())
        .map(|dim| dims[dim + 1..].iter().product())
        .collect();
    View {
        buffer: 0,
        offset: 0,
        dims: dims.to_vec(),
        strides,
    }
    .of(&[Box::leak(Box::new(buffer)).tensor(true).unwrap()])
    .unwrap()
}

#[test]
fn what_is_written_must_be_writable() {
    for Good { case, writes, .. } in goods() {
        for &name in writes {
            let error = refused(
                simulator(),
                &case,
                |args| {
                    let view = match name {
                        "o" => case.o(),
                        "snapshots" => case.snapshots.as_ref().unwrap(),
                        _ => case.written_pool(),
                    };
                    let buffer = Box::leak(Box::new(case.buffers[view.buffer].clone()));
                    let bases = vec![buffer.tensor(false).unwrap(); view.buffer + 1];
                    *tensor_of(args, name) = view.of(&bases).unwrap();
                },
                None,
            );
            assert_eq!(
                error.to_string(),
                format!(
                    "{name} is written, but was built from a shared borrow: build it from a mutable one"
                )
            );
        }
    }
}
