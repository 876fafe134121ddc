//! Arguments that break a rule: an error that names what was wrong, wanted and given, and nothing is launched.

mod rules;
mod views;

use std::cell::Cell;

use gated_delta::ops::gdn_decode::GdnDecode;
use gated_delta::ops::{GdnGates, StateLayout};
use gated_delta::{DType, Entry, Error, Tensor};
use gated_delta_tests::backend::{Backend, backends};
use gated_delta_tests::buffer::{Buffer, View};
use gated_delta_tests::case::Case;
use gated_delta_tests::compare::check;
use gated_delta_tests::slots::SlotChoice;
use gated_delta_tests::spec::{Family, Spec};

use rules::rules;

const FAMILY: Family = Family {
    layout: StateLayout::KLast,
    state: DType::F32,
    dim: 64,
};

/// B = 2, H = 2, HV = 4, K = V = 64, P = 5, with every optional tensor.
fn good() -> Case {
    let mut spec = Spec::plain(FAMILY);
    spec.slots = SlotChoice {
        write_pool: Some(0),
        ..SlotChoice::LIVE
    };
    spec.case()
}

/// Has `args` launched; the error.
fn refused(
    backend: &Backend,
    case: &Case,
    change: impl Fn(&mut GdnDecode<'_>),
    variant: Option<Entry>,
) -> Error {
    let (result, after) = backend
        .with(case, |library, stream, args| {
            let mut args = *args;
            change(&mut args);
            // SAFETY: the arguments are refused, or their buffers alive until `with` has waited.
            unsafe {
                match variant {
                    Some(variant) => library.gdn_decode_with(stream, &args, variant),
                    None => library.gdn_decode(stream, &args),
                }
            }
        })
        .unwrap();
    assert!(after == *case, "something was launched");
    result.unwrap_err()
}

#[test]
fn the_good_arguments_are_good() {
    let case = good();
    for backend in backends() {
        check(&case, &backend.run(&case, None));
    }
}

/// Each rule, and that the message names the tensor, what was wanted and what came.
#[test]
fn broken_rules_are_refused_by_name() {
    let case = good();
    for backend in backends() {
        let (variants, _) = backend.with(&case, |_, _, args| args.variants()).unwrap();
        let variant = variants.unwrap()[0];
        for rule in rules() {
            for variant in [None, Some(variant)] {
                let error = refused(backend, &case, |args| rule.change(args), variant);
                rule.assert_names_it(&error.to_string());
            }
        }
    }
}

/// The other operations that take arguments refuse the same ones.
#[test]
fn nothing_takes_what_a_launch_refuses() {
    let case = good();
    for backend in backends() {
        for rule in rules() {
            let errors = backend.with(&case, |library, _, args| {
                let mut args = *args;
                rule.change(&mut args);
                [
                    library.prewarm_gdn_decode(&args),
                    library.plan_gdn_decode(&args).map(drop),
                    args.selected().map(drop),
                    args.variants().map(drop),
                    args.bytes().map(drop),
                ]
            });
            for error in errors.unwrap().0 {
                rule.assert_names_it(&error.unwrap_err().to_string());
            }
        }
    }
}

#[test]
fn a_variant_of_another_problem_is_refused() {
    let case = good();
    for backend in backends() {
        for &variant in Entry::ALL
            .iter()
            .filter(|entry| !entry.name().starts_with("gdn_decode_klast_f32_k64_"))
        {
            let message = refused(backend, &case, |_| {}, Some(variant)).to_string();
            assert!(
                message.starts_with(&format!("variant = {} is not supported", variant.name())),
                "{message}"
            );
        }
    }
}

/// Every tensor of the arguments, by name.
fn tensors<'a, 'b>(args: &'b mut GdnDecode<'a>) -> Vec<(&'static str, &'b mut Tensor<'a>)> {
    let GdnDecode {
        q,
        k,
        v,
        gates,
        o,
        pool,
        write_pool,
        read_slots,
        write_slots,
        ..
    } = args;
    let GdnGates::Raw {
        a,
        b,
        a_log,
        dt_bias,
        ..
    } = gates
    else {
        unreachable!("the good arguments have raw gates")
    };
    let mut all = vec![
        ("q", q),
        ("k", k),
        ("v", v),
        ("a", a),
        ("b", b),
        ("A_log", a_log),
        ("dt_bias", dt_bias),
    ];
    all.extend([("o", o), ("state", pool)]);
    let optional = [
        ("write state", write_pool),
        ("read_slots", read_slots),
        ("write_slots", write_slots),
    ];
    all.extend(
        optional
            .into_iter()
            .filter_map(|(name, tensor)| Some((name, tensor.as_mut()?))),
    );
    all
}

#[test]
fn a_tensor_in_the_wrong_memory_is_refused() {
    let case = good();
    for backend in backends() {
        let (wanted, got) = if backend.name() == "simulator" {
            ("host", "device")
        } else {
            ("device", "host")
        };
        let host = vec![0u64; 64 * 1024];
        for i in 0..12 {
            let name = Cell::new("");
            let error = refused(
                backend,
                &case,
                |args| {
                    let (tensor_name, tensor) = &mut tensors(args)[i];
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
    let case = good();
    let mut in_place = case.clone();
    in_place.write_pool = None;
    for (case, names) in [(&case, ["o", "write state"]), (&in_place, ["o", "state"])] {
        for name in names {
            let read_only = case.clone();
            let error = refused(
                &backends()[0],
                case,
                |args| {
                    let (_, tensor) = tensors(args)
                        .into_iter()
                        .find(|(tensor, _)| *tensor == name)
                        .unwrap();
                    let view = if name == "o" {
                        &read_only.o
                    } else {
                        read_only.written_pool()
                    };
                    let buffer = Box::leak(Box::new(read_only.buffers[view.buffer].clone()));
                    let bases = vec![buffer.tensor(false).unwrap(); view.buffer + 1];
                    *tensor = view.of(&bases).unwrap();
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
