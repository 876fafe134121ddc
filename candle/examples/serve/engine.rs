//! The loop of an engine: requests begin and end at different steps, chunks of prompts share launches with rows that decode, drafts are
//! verified and rejected, prefixes are kept, and slots are handed on without being cleared.

use std::collections::VecDeque;
use std::fmt;

use anyhow::{Result, ensure};
use candle_core::{D, Tensor};
use candle_gated_delta::{DraftRows, NO_SLOT, Row, Rows, StatePool, Verified};

use crate::attention::KeyValues;
use crate::model::{Batch, Drafts, Model};

/// Proposes up to the given number of tokens to follow a text.
pub type Proposer = Box<dyn Fn(&[u32], usize) -> Vec<u32>>;

/// A request for tokens.
pub struct Request {
    pub prompt: Vec<u32>,
    /// Tokens to generate.
    pub most: usize,
    pub proposer: Option<Proposer>,
}

/// Result of a request.
pub struct Answer {
    pub id: usize,
    pub tokens: Vec<u32>,
    /// For every token, the logits that it was chosen from.
    pub logits: Vec<Vec<f32>>,
}

/// Limits of a step, and other settings of the engine.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Number of slots, including those of kept prefixes.
    pub slots: usize,
    /// Tokens of a step, over all rows; at least one for each slot.
    pub budget: usize,
    /// Number of drafts in a row that drafts.
    pub drafts: usize,
    /// Tokens from one kept prefix to the next, a multiple of 64.
    pub every: usize,
}

/// Counts of what the loop has done.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub steps: usize,
    /// Steps with both a prompt and rows that decode or verify.
    pub mixed: usize,
    /// Accepted drafts, and rejected ones.
    pub accepted: usize,
    pub rejected: usize,
    /// Rows that verified again after a verify, and rows that committed and continued without drafts.
    pub resumed: usize,
    pub committed: usize,
    /// Requests that started from a kept prefix, and kept prefixes that were evicted.
    pub hits: usize,
    pub evicted: usize,
    /// Slots that were taken after another use.
    pub handed_on: usize,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            steps,
            mixed,
            accepted,
            rejected,
            resumed,
            committed,
            hits,
            evicted,
            handed_on,
        } = self;
        write!(
            f,
            "{steps} steps, {mixed} of them mixed; drafts: {accepted} accepted, {rejected} rejected, {resumed} resumes, {committed} commits; \
             prefixes: {hits} hits, {evicted} evicted; {handed_on} slots handed on"
        )
    }
}

/// A sequence in a slot.
struct Live {
    id: usize,
    request: Request,
    slot: u32,
    /// Slot of the kept prefix that its first launch starts from.
    from: Option<u32>,
    /// Tokens of the prompt and of the answer so far.
    text: Vec<u32>,
    /// Tokens that are in the state and in the caches, or verified and accepted.
    computed: usize,
    /// Row in the last verify, and number of its tokens that are accepted, until these are committed to the state.
    verified: Option<(u32, u32)>,
    caches: Vec<KeyValues>,
    logits: Vec<Vec<f32>>,
}

/// A kept prefix: its tokens, and the states and caches after it.
struct Kept {
    text: Vec<u32>,
    slot: u32,
    caches: Vec<KeyValues>,
}

/// Tokens of a sequence in a step.
struct Work {
    live: usize,
    tokens: Vec<u32>,
    /// Prefixes to keep that end among these tokens: their lengths and slots.
    checkpoints: Vec<(usize, u32)>,
}

pub struct Engine<'m> {
    model: &'m Model,
    settings: Settings,
    pool: StatePool,
    waiting: VecDeque<(usize, Request)>,
    live: Vec<Live>,
    kept: Vec<Kept>,
    /// Tensors of the last verify, for every linear layer.
    verified: Vec<Verified>,
    used: Vec<bool>,
    submitted: usize,
    pub counts: Counts,
}

impl<'m> Engine<'m> {
    pub fn new(model: &'m Model, settings: Settings, pool: StatePool) -> Result<Self> {
        ensure!(
            settings.budget >= settings.slots,
            "a budget below the slots"
        );
        Ok(Self {
            used: vec![false; pool.slots()],
            model,
            settings,
            pool,
            waiting: VecDeque::new(),
            live: Vec::new(),
            kept: Vec::new(),
            verified: Vec::new(),
            submitted: 0,
            counts: Counts::default(),
        })
    }

    /// Queues a request and returns its number.
    pub fn submit(&mut self, request: Request) -> usize {
        self.waiting.push_back((self.submitted, request));
        self.submitted += 1;
        self.submitted - 1
    }

    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.live.is_empty()
    }

    /// Runs one forward pass of the model and returns the finished requests. `drafting`: whether rows may draft in this step.
    pub fn step(&mut self, drafting: bool) -> Result<Vec<Answer>> {
        self.admit()?;
        let (plain, drafts) = self.plan(drafting);
        if plain.is_empty() && drafts.is_empty() {
            return Ok(Vec::new());
        }
        self.counts.steps += 1;
        let has_prompt = plain.iter().any(|work| work.tokens.len() > 1);
        let others = drafts.len() + plain.iter().filter(|work| work.tokens.len() == 1).count();
        self.counts.mixed += usize::from(has_prompt && others > 0);

        self.commit(&plain)?;
        let batch = self.batch(&plain, &drafts)?;
        let all: Vec<&Work> = plain.iter().chain(&drafts).collect();
        let mut caches: Vec<_> = all
            .iter()
            .map(|work| std::mem::take(&mut self.live[work.live].caches))
            .collect();
        let mut borrowed: Vec<_> = caches.iter_mut().collect();
        let (logits, verified) = self.model.forward(&batch, &self.pool, &mut borrowed)?;
        for (work, caches) in all.into_iter().zip(caches) {
            self.live[work.live].caches = caches;
        }
        if batch.drafts.is_some() {
            self.verified = verified;
        }

        let mut first = 0;
        for work in plain {
            let count = work.tokens.len();
            self.after_plain(work, &logits.narrow(0, first, count)?)?;
            first += count;
        }
        for (row, work) in drafts.into_iter().enumerate() {
            let count = work.tokens.len();
            self.after_drafts(row, &work, &logits.narrow(0, first, count)?)?;
            first += count;
        }
        self.finish()
    }

    /// Gives slots to queued requests. A request starts from the longest kept prefix of its prompt, if there is one.
    fn admit(&mut self) -> Result<()> {
        while let Some((id, request)) = self.waiting.pop_front() {
            let is_prefix = |kept: &&Kept| {
                kept.text.len() < request.prompt.len() && request.prompt.starts_with(&kept.text)
            };
            let hit = self
                .kept
                .iter()
                .filter(is_prefix)
                .max_by_key(|kept| kept.text.len());
            let (from, computed, caches) = match hit {
                Some(kept) => (Some(kept.slot), kept.text.len(), kept.caches.clone()),
                None => (None, 0, self.model.cache()),
            };
            if self.pool.free_slots() == 0 {
                self.evict(from)?;
            }
            let Some(slot) = self.pool.take() else {
                self.waiting.push_front((id, request));
                return Ok(());
            };
            self.counts.hits += usize::from(from.is_some());
            let was_used = std::mem::replace(&mut self.used[slot as usize], true);
            self.counts.handed_on += usize::from(was_used);
            self.live.push(Live {
                id,
                slot,
                from,
                text: request.prompt.clone(),
                request,
                computed,
                verified: None,
                caches,
                logits: Vec::new(),
            });
        }
        Ok(())
    }

    /// Forgets the oldest kept prefix that no row is about to start from.
    fn evict(&mut self, wanted: Option<u32>) -> Result<()> {
        let is_wanted =
            |slot| wanted == Some(slot) || self.live.iter().any(|live| live.from == Some(slot));
        if let Some(oldest) = self.kept.iter().position(|kept| !is_wanted(kept.slot)) {
            let kept = self.kept.remove(oldest);
            self.pool.give_back(kept.slot)?;
            self.counts.evicted += 1;
        }
        Ok(())
    }

    /// Plans the step: the rows without drafts, and the rows with drafts.
    fn plan(&mut self, drafting: bool) -> (Vec<Work>, Vec<Work>) {
        let (mut plain, mut drafts) = (Vec::new(), Vec::new());
        let mut budget = self.settings.budget;
        // Rows with a single token to compute come first: a prompt gets the rest of the budget.
        let rest = |live: &Live| live.text.len() - live.computed;
        let mut order: Vec<usize> = (0..self.live.len()).collect();
        order.sort_by_key(|&i| (rest(&self.live[i]) > 1, self.live[i].id));
        let mut kept: Vec<Vec<u32>> = self.kept.iter().map(|kept| kept.text.clone()).collect();
        for index in order {
            let live = &self.live[index];
            let most = self.settings.drafts;
            if let (1, None, Some(propose), true) =
                (rest(live), live.from, &live.request.proposer, drafting)
            {
                let proposed = propose(&live.text, most);
                // A sequence begins without drafts.
                if live.computed > 0 && !proposed.is_empty() && budget > most {
                    // All rows have the same number of tokens: the filler after a short proposal is rejected as any other wrong draft.
                    let filler = std::iter::repeat(0);
                    let last = live.text.last().copied();
                    let tokens = last.into_iter().chain(proposed).chain(filler);
                    drafts.push(Work {
                        live: index,
                        tokens: tokens.take(1 + most).collect(),
                        checkpoints: Vec::new(),
                    });
                    budget -= 1 + most;
                    continue;
                }
            }
            let (start, count) = (live.computed, rest(live).min(budget));
            if count == 0 {
                continue;
            }
            budget -= count;
            let end = start + count;
            let mut checkpoints = Vec::new();
            for length in start + 1..=end.min(live.request.prompt.len()) {
                if length % self.settings.every != 0 {
                    continue;
                }
                let prefix = &live.text[..length];
                let is_new = !kept.iter().any(|text| text == prefix);
                // The last free slot is kept for a request.
                let slot = match is_new && self.pool.free_slots() > 1 {
                    true => self.pool.take(),
                    false => None,
                };
                if let Some(slot) = slot {
                    let was_used = std::mem::replace(&mut self.used[slot as usize], true);
                    self.counts.handed_on += usize::from(was_used);
                    kept.push(prefix.to_vec());
                }
                checkpoints.push((length, slot.unwrap_or(NO_SLOT)));
            }
            plain.push(Work {
                live: index,
                tokens: live.text[start..end].to_vec(),
                checkpoints,
            });
        }
        (plain, drafts)
    }

    /// Commits verified tokens of rows that continue without drafts.
    fn commit(&mut self, plain: &[Work]) -> Result<()> {
        let (mut slots, mut keep, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        for work in plain {
            let live = &mut self.live[work.live];
            if let Some((row, kept)) = live.verified.take() {
                slots.push(live.slot);
                keep.push(kept);
                rows.push(row);
            }
        }
        if rows.is_empty() {
            return Ok(());
        }
        self.counts.committed += rows.len();
        let verified = self.select(&rows)?;
        let rows = DraftRows::new(&slots, &keep, &self.model.device)?;
        self.model.commit(&verified, &rows, &self.pool)
    }

    /// Tensors of the last verify for these of its rows, for all linear layers.
    fn select(&self, rows: &[u32]) -> Result<Vec<Verified>> {
        let rows = Tensor::new(rows, &self.model.device)?;
        let of_layers = self.verified.iter();
        Ok(of_layers
            .map(|of| of.select(&rows))
            .collect::<candle_core::Result<_>>()?)
    }

    fn batch(&mut self, plain: &[Work], drafts: &[Work]) -> Result<Batch> {
        let device = &self.model.device;
        let all = || plain.iter().chain(drafts);
        let mut rows = Vec::new();
        for work in plain {
            let live = &mut self.live[work.live];
            rows.push(Row {
                slot: live.slot,
                from: live.from.take(),
                tokens: work.tokens.len(),
                position: live.computed,
                checkpoints: work.checkpoints.iter().map(|&(_, slot)| slot).collect(),
            });
        }
        let rows = match rows.is_empty() {
            true => None,
            false => Some(Rows::new(&rows, self.settings.every, device)?),
        };
        let of_drafts = || drafts.iter().map(|work| &self.live[work.live]);
        let slots: Vec<u32> = of_drafts().map(|live| live.slot).collect();
        // A row that was not in the last verify names any row of it, and keeps none of its tokens.
        let last: Vec<(u32, u32)> = of_drafts()
            .map(|live| live.verified.unwrap_or((0, 0)))
            .collect();
        let (last_rows, keep): (Vec<u32>, Vec<u32>) = last.into_iter().unzip();
        let resumes = of_drafts().filter(|live| live.verified.is_some()).count();
        self.counts.resumed += resumes;
        let drafts = match drafts.first() {
            None => None,
            Some(first) => Some(Drafts {
                rows: DraftRows::new(&slots, &keep, device)?,
                tokens: first.tokens.len(),
                previous: match resumes {
                    0 => None,
                    _ => Some(self.select(&last_rows)?),
                },
            }),
        };
        Ok(Batch {
            tokens: all().flat_map(|work| work.tokens.iter().copied()).collect(),
            counts: all().map(|work| work.tokens.len()).collect(),
            rows,
            drafts,
        })
    }

    /// Updates a row without drafts: counts its tokens, keeps its prefixes, and takes a token from its last logits at the end of the text.
    fn after_plain(&mut self, work: Work, logits: &Tensor) -> Result<()> {
        let live = &mut self.live[work.live];
        live.computed += work.tokens.len();
        for (length, slot) in work.checkpoints {
            if slot != NO_SLOT {
                let mut caches = live.caches.clone();
                caches
                    .iter_mut()
                    .try_for_each(|cache| cache.truncate(length))?;
                self.kept.push(Kept {
                    text: live.text[..length].to_vec(),
                    slot,
                    caches,
                });
            }
        }
        if live.computed == live.text.len() {
            let last = logits.narrow(0, work.tokens.len() - 1, 1)?;
            live.text.extend(greedy(&last)?);
            live.logits.push(last.flatten_all()?.to_vec1()?);
        }
        Ok(())
    }

    /// Updates a row with drafts: takes the drafts that equal the model's choice, and the model's next token.
    fn after_drafts(&mut self, row: usize, work: &Work, logits: &Tensor) -> Result<()> {
        let live = &mut self.live[work.live];
        let chosen = greedy(logits)?;
        let drafts = &work.tokens[1..];
        let right = drafts
            .iter()
            .zip(&chosen)
            .take_while(|(a, b)| a == b)
            .count();
        self.counts.accepted += right;
        self.counts.rejected += drafts.len() - right;
        let kept = 1 + right;
        live.text.extend(&chosen[..kept]);
        live.logits
            .extend(logits.narrow(0, 0, kept)?.to_vec2::<f32>()?);
        live.verified = Some((row as u32, kept as u32));
        live.computed += kept;
        let computed = live.computed;
        live.caches
            .iter_mut()
            .try_for_each(|cache| cache.truncate(computed))
    }

    /// Removes the requests that have all of their tokens. Their slots are handed on without being cleared or committed.
    fn finish(&mut self) -> Result<Vec<Answer>> {
        let mut answers = Vec::new();
        for mut live in std::mem::take(&mut self.live) {
            let (start, most) = (live.request.prompt.len(), live.request.most);
            if live.text.len() < start + most {
                self.live.push(live);
                continue;
            }
            live.text.truncate(start + most);
            live.logits.truncate(most);
            self.pool.give_back(live.slot)?;
            answers.push(Answer {
                id: live.id,
                tokens: live.text.split_off(start),
                logits: live.logits,
            });
        }
        Ok(answers)
    }
}

fn greedy(logits: &Tensor) -> candle_core::Result<Vec<u32>> {
    logits.argmax(D::Minus1)?.to_vec1()
}
