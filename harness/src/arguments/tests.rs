use gated_delta::{DType, Formulation};

use super::*;

fn tensor(dtype: DType, dims: &[usize]) -> Tensor<'static> {
    // SAFETY: nothing is launched.
    unsafe { Tensor::from_raw(0x1_0000, dtype, dims) }.unwrap()
}

fn tokens() -> Tokens<Tensor<'static>> {
    let (x, gate) = (
        tensor(DType::F32, &[2, 3, 1, 64]),
        tensor(DType::F32, &[2, 3, 1]),
    );
    Tokens {
        k: x,
        v: x,
        gate,
        beta: gate,
    }
}

fn pool() -> Tensor<'static> {
    tensor(DType::F32, &[5, 1, 64, 64])
}

fn slots() -> Option<Tensor<'static>> {
    Some(tensor(DType::I32, &[2]))
}

fn step() -> Arguments<Tensor<'static>> {
    let tokens = tokens();
    Arguments {
        new: Some(New {
            q: tokens.k,
            o: tokens.v,
            tokens,
        }),
        ..Arguments::new(GateKind::Given, pool())
    }
}

/// A step of one token with a convolution.
fn convolved() -> Arguments<Tensor<'static>> {
    let (gate, windows) = (
        tensor(DType::F32, &[2, 1, 1]),
        tensor(DType::F32, &[5, 192, 3]),
    );
    Arguments {
        convolved: Some(Convolved {
            x: tensor(DType::F32, &[2, 1, 192]),
            heads: 1,
            gate,
            beta: gate,
            o: tensor(DType::F32, &[2, 1, 1, 64]),
            weight: tensor(DType::F32, &[192, 4]),
            bias: None,
            activation: Activation::None,
            windows,
            write_windows: Some(windows),
            window_snapshots: None,
        }),
        ..Arguments::new(GateKind::Given, pool())
    }
}

/// Previous tokens in the form of a convolution's input, T' = 3 as in [`tokens`].
fn kept_x(conv: Option<CommitConvolution<Tensor<'static>>>) -> Option<KeptX<Tensor<'static>>> {
    let gate = tensor(DType::F32, &[2, 3, 1]);
    Some(KeptX {
        x: tensor(DType::F32, &[2, 3, 192]),
        gate,
        beta: gate,
        keep: tensor(DType::I32, &[2]),
        conv,
    })
}

fn conv_resume() -> Arguments<Tensor<'static>> {
    Arguments {
        previous_x: kept_x(None),
        ..convolved()
    }
}

fn conv_commit() -> Arguments<Tensor<'static>> {
    let windows = tensor(DType::F32, &[5, 192, 3]);
    let conv = CommitConvolution {
        heads: 1,
        weight: tensor(DType::F32, &[192, 4]),
        bias: Some(tensor(DType::F32, &[192])),
        activation: Activation::None,
        windows,
        write_windows: Some(windows),
    };
    Arguments {
        previous_x: kept_x(Some(conv)),
        fresh: slots(),
        ..Arguments::new(GateKind::Given, pool())
    }
}

/// A step with a convolution and window snapshots.
fn conv_snapshots() -> Arguments<Tensor<'static>> {
    let mut arguments = convolved();
    if let Some(convolved) = &mut arguments.convolved {
        convolved.window_snapshots = Some(tensor(DType::F32, &[2, 1, 192, 3]));
    }
    arguments.snapshots = Some(tensor(DType::F32, &[2, 1, 1, 64, 64]));
    arguments
}

fn norm() -> Option<GatedNorm<Tensor<'static>>> {
    Some(GatedNorm {
        z: tensor(DType::F32, &[2, 1, 1, 64]),
        weight: tensor(DType::F32, &[64]),
        eps: 1e-6,
        activation: Activation::Sigmoid,
    })
}

fn resume() -> Arguments<Tensor<'static>> {
    Arguments {
        previous: Some(Kept {
            tokens: tokens(),
            keep: tensor(DType::I32, &[2]),
        }),
        ..step()
    }
}

fn commit() -> Arguments<Tensor<'static>> {
    Arguments {
        new: None,
        ..resume()
    }
}

fn read_only() -> Arguments<Tensor<'static>> {
    Arguments {
        update_state: false,
        ..step()
    }
}

fn per_token() -> Arguments<Tensor<'static>> {
    Arguments {
        token_slots: Some(tensor(DType::I32, &[2, 3])),
        ..step()
    }
}

fn raw(a_log: bool, dt_bias: bool) -> Arguments<Tensor<'static>> {
    let parameter = tensor(DType::F32, &[1]);
    Arguments {
        gates: GateKind::Raw(BetaScale::One),
        a_log: a_log.then_some(parameter),
        dt_bias: dt_bias.then_some(parameter),
        ..step()
    }
}

/// A prefill of 70 tokens with positions, checkpoints and a workspace.
fn prefill() -> Arguments<Tensor<'static>> {
    let (x, gate) = (
        tensor(DType::F32, &[2, 70, 1, 64]),
        tensor(DType::F32, &[2, 70, 1]),
    );
    let tokens = Tokens {
        k: x,
        v: x,
        gate,
        beta: gate,
    };
    Arguments {
        new: Some(New { q: x, tokens, o: x }),
        positions: slots(),
        checkpoints: Some(Checkpoints {
            every: 64,
            slots: tensor(DType::I32, &[2, 3]),
        }),
        workspace: Some(tensor(DType::F32, &[1 << 20])),
        options: Options::default().formulation(Formulation::Chunked),
        ..step()
    }
}

/// Gives each tensor an address of its own. Returns the tensors' names in the order of their addresses.
fn spread(arguments: &mut Arguments<Tensor<'static>>) -> Vec<&'static str> {
    let (addresses, mut names) = ((1..).map(|i| 0x1_0000 * i), Vec::new());
    for ((name, tensor), address) in arguments.tensors_mut().into_iter().zip(addresses) {
        // SAFETY: nothing is launched.
        let moved = unsafe { Tensor::from_raw(address, tensor.dtype(), tensor.dims()) };
        *tensor = moved.unwrap();
        names.push(name);
    }
    names
}

#[test]
fn everything_of_previous_tokens_of_a_convolution_arrives() {
    let arrived = |mut arguments: Arguments<Tensor<'static>>, all: &[&str], of: &[&str]| {
        assert_eq!(spread(&mut arguments), all);
        let params = arguments.work().unwrap().params();
        for name in of {
            let address = match *name {
                "x" if arguments.is_commit() => params.previous_x,
                "x" => params.x,
                "previous x" => params.previous_x,
                "previous g" => params.step.previous_g,
                "previous beta" => params.step.previous_b,
                "g" => params.step.previous_g,
                "beta" => params.step.previous_b,
                "keep" => params.step.keep,
                "conv_weight" => params.conv_weight,
                "conv_bias" => params.conv_bias,
                "windows" => params.read_windows,
                "write_windows" => params.write_windows,
                "window_snapshots" => params.window_snapshots,
                "snapshots" => params.step.snapshots,
                "fresh" => params.step.fresh,
                other => unreachable!("{other}"),
            };
            let place = all.iter().position(|other| other == name).unwrap() as u64;
            assert_eq!(address, 0x1_0000 * (1 + place), "{name}");
        }
    };
    #[rustfmt::skip]
    let resume = ["x", "g", "beta", "o", "conv_weight", "windows", "write_windows", "previous x", "previous g", "previous beta", "keep", "pool"];
    arrived(
        conv_resume(),
        &resume,
        &["x", "previous x", "previous g", "previous beta", "keep"],
    );
    #[rustfmt::skip]
    let of_x = ["x", "g", "beta", "keep", "conv_weight", "windows", "conv_bias", "write_windows", "pool", "fresh"];
    let of_commit: Vec<_> = of_x.into_iter().filter(|name| *name != "pool").collect();
    arrived(conv_commit(), &of_x, &of_commit);
    #[rustfmt::skip]
    let snapshots = ["x", "g", "beta", "o", "conv_weight", "windows", "write_windows", "window_snapshots", "pool", "snapshots"];
    arrived(
        conv_snapshots(),
        &snapshots,
        &["window_snapshots", "snapshots"],
    );
    let fresh = Arguments {
        fresh: slots(),
        ..commit()
    };
    let of_kv = ["k", "v", "g", "beta", "keep", "pool", "fresh"];
    arrived(fresh, &of_kv, &["g", "beta", "keep", "fresh"]);
    // `map` builds the arguments tensor by tensor, and must lose none.
    for arguments in [conv_resume(), conv_commit(), conv_snapshots(), prefill()] {
        let same = arguments.map(&|tensor| Ok::<_, Error>(*tensor)).unwrap();
        let bytes = |arguments: &Arguments<Tensor<'_>>| arguments.work()?.bytes();
        assert_eq!(bytes(&same).unwrap(), bytes(&arguments).unwrap());
        let all = |mut arguments: Arguments<Tensor<'static>>| spread(&mut arguments);
        assert_eq!(all(same), all(arguments));
    }
}

#[test]
fn everything_of_a_convolution_and_a_norm_arrives() {
    let mut arguments = Arguments {
        norm: norm(),
        fresh: slots(),
        ..convolved()
    };
    let names = spread(&mut arguments);
    #[rustfmt::skip]
    let all = ["x", "g", "beta", "o", "conv_weight", "windows", "write_windows", "z", "norm_weight", "pool", "fresh"];
    assert_eq!(names, all);
    let params = arguments.work().unwrap().params();
    let at = |name| 0x1_0000 * (1 + all.iter().position(|other| *other == name).unwrap() as u64);
    #[rustfmt::skip]
    let got = [
        ("x", params.x), ("g", params.step.g), ("beta", params.step.b), ("o", params.step.o),
        ("conv_weight", params.conv_weight), ("windows", params.read_windows), ("write_windows", params.write_windows),
        ("z", params.z), ("norm_weight", params.norm_weight), ("pool", params.step.read_pool), ("fresh", params.step.fresh),
    ];
    for (name, address) in got {
        assert_eq!(address, at(name), "{name}");
    }
}

#[test]
fn everything_of_a_prefill_arrives() {
    let mut arguments = prefill();
    // `spread` gives addresses that are aligned as a workspace has to be.
    let names = spread(&mut arguments);
    #[rustfmt::skip]
    let all = ["q", "k", "v", "g", "beta", "o", "pool", "positions", "workspace", "checkpoint_slots"];
    assert_eq!(names, all);
    let work = arguments.work().unwrap();
    work.bytes().unwrap();
    let sizes = |rows: usize| {
        let mut arguments = prefill();
        if let Some(checkpoints) = &mut arguments.checkpoints {
            checkpoints.slots = tensor(DType::I32, &[rows, 3]);
        }
        arguments.work()?.bytes()
    };
    sizes(2).unwrap();
    assert!(
        sizes(3)
            .unwrap_err()
            .to_string()
            .contains("checkpoint_slots")
    );
}

#[test]
fn what_contradicts_itself_is_refused_by_name() {
    for good in [
        step(),
        resume(),
        commit(),
        read_only(),
        per_token(),
        raw(true, true),
        convolved(),
        Arguments {
            norm: norm(),
            fresh: slots(),
            ..convolved()
        },
        Arguments {
            fresh: slots(),
            ..commit()
        },
        conv_resume(),
        conv_commit(),
        prefill(),
    ] {
        good.work().unwrap().bytes().unwrap();
    }
    let mut softplus = step();
    softplus.gates = GateKind::Kda(DecayKind::Softplus, KdaBeta::Given);
    let snapshots = Some(tensor(DType::F32, &[2, 3, 1, 64, 64]));
    let (start, kept, none) = (
        "they say where states start and where each of them goes",
        "the state after the kept tokens is written, and no other",
        "no state is written",
    );
    let both = |one, other, why| format!("{one} and {other} exclude each other: {why}");
    #[rustfmt::skip]
    let cases = [
        (Arguments { accepted: slots(), ..step() }, "token_slots is missing: accepted tokens need it".to_owned()),
        (Arguments { read_slots: slots(), ..per_token() }, both("token_slots", "read_slots", start)),
        (Arguments { write_slots: slots(), ..per_token() }, both("token_slots", "write_slots", start)),
        (Arguments { previous: resume().previous, ..per_token() }, both("token_slots", "previous", start)),
        (Arguments { token_slots: per_token().token_slots, ..commit() }, both("token_slots", "a commit", start)),
        (Arguments { update_state: false, ..per_token() }, both("token_slots", "update_state = false", start)),
        (Arguments { update_state: false, ..resume() }, both("previous", "update_state = false", kept)),
        (Arguments { snapshots, ..resume() }, both("previous", "snapshots", kept)),
        (Arguments { update_state: false, ..commit() }, both("a commit", "update_state = false", kept)),
        (Arguments { snapshots, ..commit() }, both("a commit", "snapshots", kept)),
        (Arguments { write_slots: slots(), ..read_only() }, both("update_state = false", "write_slots", none)),
        (Arguments { write_pool: Some(pool()), ..read_only() }, both("update_state = false", "write_pool", none)),
        (Arguments { new: step().new, ..convolved() }, both("q", "x", "a convolution makes q, k and v of x")),
        (Arguments { norm: norm(), ..commit() }, both("a commit", "z", "it has no new tokens")),
        (Arguments { positions: slots(), ..commit() }, both("a commit", "positions", "it has no new tokens")),
        (Arguments { checkpoints: prefill().checkpoints, ..commit() }, both("a commit", "checkpoints", "it has no new tokens")),
        (Arguments { workspace: prefill().workspace, ..commit() }, both("a commit", "workspace", "it has no new tokens")),
        (Arguments { previous_x: conv_commit().previous_x, ..commit() }, both("previous k", "previous x", "a convolution makes k and v of x")),
        (Arguments { token_slots: per_token().token_slots, ..conv_resume() }, both("token_slots", "previous", start)),
        (Arguments { update_state: false, ..conv_commit() }, both("a commit", "update_state = false", kept)),
        (Arguments { update_state: false, ..convolved() }, both("update_state = false", "write_windows", none)),
        (Arguments { new: None, ..step() }, "q is missing: new tokens need it".to_owned()),
        (raw(false, true), "A_log is missing: raw gates need it".to_owned()),
        (raw(true, false), "dt_bias is missing: raw gates need it".to_owned()),
        (softplus, "A_log is missing: softplus gates need it".to_owned()),
    ];
    for (args, wanted) in cases {
        let message = args.work().err().map(|error| error.to_string());
        assert_eq!(message, Some(wanted));
    }
}
