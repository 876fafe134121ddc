//! Plans: launches in which all but addresses, B and P is fixed.

use gated_delta::{Activation, DType, Error, Formulation, HeadMap, StateLayout, Work};
use gated_delta_harness::arguments::{GateKind, Operator};
use gated_delta_test_support::backend::{Turns, backends, simulator};
use gated_delta_test_support::for_all;
use gated_delta_test_support::layout::{Layout, Spacing};
use gated_delta_test_support::problem::Change;
use gated_delta_test_support::slots::SlotChoice;
use gated_delta_test_support::spec::{ConvChoice, Family, NormChoice, Spec};
use gated_delta_test_support::strategy::any_specs;

use crate::engine::families;

#[test]
fn a_planned_launch_has_the_bits_of_a_launch() {
    let turns = Turns::new(0);
    for_all("plans", 100, any_specs(Family::all(), 8), move |spec| {
        let case = spec.case();
        turns.next(|backend| {
            let planned = backend.with(&case, |library, stream, args| {
                let work = args.work()?;
                let plan = library.plan(&*work)?;
                // SAFETY: the buffers are alive until `with` has waited, and the plan was made for these arguments.
                unsafe { plan.launch(stream, &*work) }
            });
            let (launched, after) = planned.unwrap();
            launched.unwrap();
            assert!(after == backend.run(&case, None), "the plan differs");
        });
    });
}

/// A plan for one row launches three rows, and none.
#[test]
fn a_plan_is_for_any_number_of_rows() {
    for family in Family::of_each_kind() {
        let spec = Spec {
            batch: 3,
            slots: SlotChoice::LIVE,
            ..Spec::plain(family)
        };
        let problem = spec.problem();
        let [one, all, none] = [&[0][..], &[0, 1, 2], &[]]
            .map(|rows: &[usize]| problem.take_rows(rows).case(&spec.form));
        for backend in backends() {
            let plan = |work: &dyn Work| backend.library().plan(work).unwrap();
            let planned = backend.with(&one, |_, _, args| plan(&*args.work().unwrap()));
            let (plan, _) = planned.unwrap();
            for case in [&all, &none] {
                let launched = backend.with(case, |_, stream, args| {
                    // SAFETY: the buffers are alive until `with` has waited, and the plan takes any number of rows.
                    unsafe { plan.launch(stream, &*args.work()?) }
                });
                let (launched, after) = launched.unwrap();
                launched.unwrap();
                assert!(after == backend.run(case, None), "the plan differs");
            }
        }
    }
}

/// A plan of a prefill that the library chose launches a prefill even for few tokens, which would otherwise have another
/// formulation.
#[test]
fn a_prefills_plan_launches_prefills_of_any_length() {
    let mut families = Family::prefills();
    families.retain(|family| family.dim == 64 && family.state != DType::F16);
    for family in families {
        let of = |tokens: usize, formulation: Formulation| {
            let spec = Spec {
                tokens,
                ..Spec::plain(family)
            };
            let mut case = spec.case();
            case.args.options = case.options.formulation(formulation);
            // A prefill has a workspace. Rows this short need none on Hopper.
            case.args.workspace = None;
            case
        };
        let [long, short] = [20, 3].map(|tokens| of(tokens, Formulation::Auto));
        assert_ne!(short.formulation(), Formulation::Chunked);
        let planned = simulator().with(&long, |library, _, args| {
            library.plan(&*args.work().unwrap()).unwrap()
        });
        let (plan, _) = planned.unwrap();
        let launched = simulator().with(&short, |_, stream, args| {
            // SAFETY: the buffers are alive until `with` has waited, and the plan of a prefill takes any T.
            unsafe { plan.launch(stream, &*args.work()?) }
        });
        let (launched, after) = launched.unwrap();
        launched.unwrap();
        let by_name = of(3, Formulation::Chunked);
        assert!(after == simulator().run(&by_name, None), "{family:?}");
    }
}

/// A plan in the simulator refuses a layer step with another convolution, another norm, or fresh rows.
#[test]
fn the_simulator_refuses_what_is_not_planned_of_a_layer() {
    fn conv(spec: &mut Spec, change: fn(&mut ConvChoice)) {
        spec.conv.iter_mut().for_each(change);
    }
    fn norm(spec: &mut Spec, change: fn(&mut NormChoice)) {
        spec.norm.iter_mut().for_each(change);
    }
    let changes: [fn(&mut Spec); 11] = [
        |spec| spec.conv = None,
        |spec| spec.norm = None,
        |spec| spec.fresh = true,
        |spec| spec.form.token_major = true,
        |spec| spec.form.norm[0] = DType::F16,
        |spec| spec.form.norm[1] = DType::F16,
        |spec| conv(spec, |conv| conv.taps = 3),
        |spec| conv(spec, |conv| conv.bias = true),
        |spec| conv(spec, |conv| conv.activation = Activation::None),
        |spec| norm(spec, |norm| norm.eps = 1e-5),
        |spec| norm(spec, |norm| norm.activation = Activation::Sigmoid),
    ];
    for operator in [Operator::Gdn, Operator::Kda] {
        let family = Family::layer(operator, StateLayout::VLast, DType::F32, 64);
        refuses(family, &changes);
    }
}

/// A plan in the simulator refuses launches that it was not made for. Its check is complete, so that an engine's tests find such
/// launches.
#[test]
fn the_simulator_refuses_what_is_not_planned() {
    let changes: [fn(&mut Spec); 14] = [
        |spec| spec.heads += 1,
        |spec| spec.ratio += 1,
        |spec| spec.dim = 128,
        |spec| spec.update_state = false,
        |spec| spec.options.head_map = HeadMap::Tiled,
        |spec| spec.options.qk_l2norm = false,
        |spec| spec.options.scale = Some(0.25),
        |spec| spec.options.null_slot = Some(9),
        |spec| spec.form.qkvo[0] = DType::F16,
        |spec| spec.form.qkvo[3] = DType::F32,
        |spec| spec.form.gates[1] = DType::F32,
        |spec| spec.form.io = Spacing::Odd,
        |spec| spec.form.pools = Spacing::Odd,
        |spec| match &mut spec.gates {
            GateKind::Kda(_, beta) => *beta = gated_delta::KdaBeta::Given,
            gates => *gates = GateKind::Given,
        },
    ];
    for family in families() {
        refuses(family, &changes);
    }
}

/// Panics unless the plan of a plain launch in the simulator refuses each of the changed ones.
fn refuses(family: Family, changes: &[fn(&mut Spec)]) {
    let backend = simulator();
    let planned = backend.with(&Spec::plain(family).case(), |library, _, args| {
        library.plan(&*args.work().unwrap()).unwrap()
    });
    let (plan, _) = planned.unwrap();
    for (i, change) in changes.iter().enumerate() {
        let mut spec = Spec::plain(family);
        change(&mut spec);
        let case = spec.case();
        let launched = backend.with(&case, |_, stream, args| {
            // SAFETY: the buffers are alive until `with` has waited, and the plan refuses the launch.
            unsafe { plan.launch(stream, &*args.work()?) }
        });
        let (launched, after) = launched.unwrap();
        let refused = matches!(
            launched,
            Err(Error::Contradiction {
                one: "the plan",
                other: "these arguments",
                ..
            })
        );
        assert!(refused, "{family:?}, change {i}: {launched:?}");
        assert!(after == case, "something was launched");
    }
}
