"""Planted faults: what each is, where, and the tests that must notice it.

A fault replaces a text that occurs exactly once in its file, so that a change of the code which
moves a fault elsewhere is noticed, too.
"""

from __future__ import annotations

from typing import NamedTuple

VERIFY = "csrc/verify_draft_cpu.cpp"
TREE = "csrc/verify_tree_cpu.cpp"
DRAFTERS = "python/exactspec/drafters.py"
# A test of a draft head.
ROWS = "rows_are_those_of_a_head_that_sees_the_text_only[7-alone-token]"


def case(name: str) -> str:
    return f"tests/test_verify_draft.py::test_case[cpu-{name}]"


def stratified(scenario: str) -> str:
    return f"tests/test_exactness.py::test_stratified[cpu-{scenario}]"


def stratified_block(scenario: str) -> str:
    return f"tests/test_exactness.py::test_stratified_block[cpu-{scenario}]"


def replay(rule: str) -> str:
    return f"tests/test_verify_draft.py::test_replay[cpu-{rule}-300]"


def tree(name: str) -> str:
    return f"tests/test_verify_tree.py::test_{name}"


def mtp(name: str) -> str:
    return f"tests/test_mtp.py::test_{name}"


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # each of them must fail


MUTANTS = [
    Mutant(
        "accept at equality",
        VERIFY,
        "return threshold < target_prob(i);",
        "return threshold <= target_prob(i);",
        (case("impossible-draft-at-u-zero"), case("impossible-draft-one-hot")),
    ),
    Mutant(
        "accept by the draft's probability",
        VERIFY,
        "return threshold < target_prob(i);",
        "return job_.noise.coin(b_, i) < draft(i).prob(token(i));",
        (case("seed-acceptance-rule-reject"), stratified("dense")),
    ),
    Mutant(
        "no residual",
        VERIFY,
        "return draw_residual(i, 1.0);",
        "return draw_target(i);",
        (stratified("dense"), stratified("sparse"), stratified("one-hot")),
    ),
    Mutant(
        "residual from the row before",
        VERIFY,
        "return draw_residual(i, 1.0);",
        "return draw_residual(std::max(i - 1, 0), 1.0);",
        (stratified("dense-2"), stratified("one-hot-2")),
    ),
    Mutant(
        "bonus row off by one",
        VERIFY,
        "return draw_target(length_);",
        "return draw_target(std::max(length_ - 1, 0));",
        (case("ragged-lengths-bonus-row"), stratified("dense")),
    ),
    Mutant(
        "filter skipped on the draft side",
        VERIFY,
        "draft_sampling_(job.draft_sampling, job.options.draft_order, b)",
        "draft_sampling_()",
        (
            case("draft-probability-must-be-the-filtered-one-2"),
            stratified("top-k-draft"),
            stratified("min-p"),
        ),
    ),
    Mutant(
        "draw pair taken behind the draft in use",
        VERIFY,
        "job_.noise.pair(b_, u);\n    return draw(target_row(i), target(i), u);",
        "u[0] = job_.noise.coin(b_, length_);\n    u[1] = job_.noise.coin(b_, length_ + 1);\n"
        "    return draw(target_row(i), target(i), u);",
        (case("ragged-draw-pair-is-at-K"),),
    ),
    Mutant(
        "the coin's noise used again for the draw",
        "csrc/noise.h",
        "u[i] = keyed_ ? word(b, MAX_KEYED_DRAFTS + i)",
        "u[i] = keyed_ ? word(b, 1 - i)",
        ("tests/test_exactness.py::test_narrow_chi_square[cpu]",),
    ),
    Mutant(
        "draws that ignore the second uniform",
        "csrc/row_cpu.h",
        "return first + pick(w, n, u[1]);",
        "return first + pick(w, n, u[0]);",
        (
            "tests/test_sample.py::test_two_levels[cpu]",
            "tests/test_sample.py::test_one_block_ignores_the_first_uniform[cpu]",
        ),
    ),
    Mutant(
        "token outside the vocabulary followed by a draw from the target",
        VERIFY,
        "flag_if(id >= job_.vocab_size, OUT_OF_RANGE);",
        "if (id >= job_.vocab_size) { status_ |= OUT_OF_RANGE; return draw_target(i); }",
        (case("drawn-padding-id"), stratified("padded")),
    ),
    Mutant(
        "repeated draft ids overwrite one another",
        "csrc/draft_row_cpu.cpp",
        "out[from->id - first] += entry_prob(*from);",
        "out[from->id - first] = entry_prob(*from);",
        (stratified("sparse"), stratified("vocab")),
    ),
    Mutant(
        "bitmask forgotten in the residual",
        VERIFY,
        "draft(slot).residual(target_row(slot), dist,",
        "draft(slot).residual(make_row(job_.target_logits, b_, slot), dist,",
        (stratified("bitmask"),),
    ),
    Mutant(
        "nucleus keeps a token at its edge",
        "csrc/row_cpu.cpp",
        "kept < limit && before < wanted",
        "kept < limit && before <= wanted",
        ("tests/test_sample.py::test_top_p_is_strict[cpu]",),
    ),
    Mutant(
        "min_p_first: the nucleus of all ids",
        "csrc/row_cpu.cpp",
        "sampling.order == Order::MinPFirst && sampling.min_p > 0",
        "false",
        (
            case("order-min-p-first"),
            stratified("min-p-first"),
            "tests/test_sample.py::test_replay[cpu-independent-300]",
        ),
    ),
    Mutant(
        "sequential_untempered: filters measured after the temperature",
        "csrc/row_cpu.cpp",
        "(sampling.has_filters() && measures_untempered(sampling.order))",
        "(sampling.has_filters() && sampling.order == Order::TemperatureLast)",
        (
            case("order-sequential-untempered"),
            stratified("sequential-untempered"),
            "tests/test_sample.py::test_replay[cpu-independent-300]",
        ),
    ),
    Mutant(
        "ties in the order of descending ids",
        "csrc/row_cpu.cpp",
        "<< 32 | ~static_cast<uint32_t>(id);",
        "<< 32 | static_cast<uint32_t>(id);",
        (case("top-k-ties-by-id"),),
    ),
    Mutant(
        "block: a draft is accepted whole, whatever its coin",
        VERIFY,
        "job_.noise.coin(b_, n - 1) < weight[n]",
        "weight[n] > 0",
        (case("block-token-that-ends-the-draft"), stratified_block("dense")),
    ),
    Mutant(
        "block: residual without the weight",
        VERIFY,
        "return draw_residual(i, weight[i], mass);",
        "return draw_residual(i, 1.0);",
        (case("block-residual-has-the-weight"),),
    ),
    Mutant(
        "block: sum of the row before",
        VERIFY,
        "auto mass = residual_mass(i, weight[i]);",
        "auto mass = residual_mass(i - 1, weight[i]);",
        (case("block-middle-prefix"), replay("block")),
    ),
    Mutant(
        "block: coin of the slot behind",
        VERIFY,
        "job_.noise.coin(b_, i - 1) < sum / all",
        "job_.noise.coin(b_, i) < sum / all",
        (case("block-middle-prefix"), stratified_block("dense-2")),
    ),
    Mutant(
        "block: weights that grow above 1",
        VERIFY,
        "std::min(before * target_p / draft_p, 1.0)",
        "before * target_p / draft_p",
        (stratified_block("dense-2"), replay("block")),
    ),
    Mutant(
        "coupled: the noise of slot 0 in every slot",
        VERIFY,
        "static_cast<uint32_t>(*job_.positions.at<int32_t>(b_)) + i;",
        "static_cast<uint32_t>(*job_.positions.at<int32_t>(b_));",
        (
            "tests/test_rules.py::test_coupled_text_does_not_depend_on_the_drafter[cpu]",
            "tests/test_rules.py::test_coupled_tokens_are_what_sample_gives[cpu]",
            replay("coupled"),
        ),
    ),
    Mutant(
        "coupled: an even and an odd id swap their words",
        "csrc/block_ops_impl.h",
        "word[j] = static_cast<float>(words.first);\n"
        "    word[kWidth + j] = static_cast<float>(words.second);",
        "word[kWidth + j] = static_cast<float>(words.first);\n"
        "    word[j] = static_cast<float>(words.second);",
        ("tests/test_rules.py::test_gumbel_of_keys[cpu-10000]", replay("coupled")),
    ),
    Mutant(
        "coupled: a uniform may round to 1",
        "csrc/block_ops_impl.h",
        "x = x < LARGEST_UNIFORM ? x : Floats{} + LARGEST_UNIFORM;",
        "",
        ("tests/test_rules.py::test_gumbel_of_words[portable]",),
    ),
    Mutant(
        "typical: entropy with the wrong sign",
        VERIFY,
        "delta * std::exp(-entropy)",
        "delta * std::exp(entropy)",
        ("tests/test_rules.py::test_typical_threshold[cpu]", replay("typical")),
    ),
    Mutant(
        "cascade: the more confident the draft, the more it defers",
        VERIFY,
        "draft(i).largest() < target(i).dist.scale() - rule().parameters[0]",
        "draft(i).largest() > target(i).dist.scale() - rule().parameters[0]",
        (
            "tests/test_rules.py::test_cascade_that_always_defers_is_the_token_rule[cpu]",
            replay("cascade"),
        ),
    ),
    Mutant(
        "tree: siblings judged by the target as it was before them",
        TREE,
        "return left(id) / mass_;",
        "return target_.dist.prob(row_.logit(id), id);",
        (
            tree("stratified[cpu-(-1, -1)-with replacement]"),
            tree("stratified[cpu-(-1, -1)-one-hot]"),
            tree("chi_square[with-cpu]"),
            tree("siblings_by_hand[cpu]"),
        ),
    ),
    Mutant(
        "tree: draft row of the node before the parent",
        TREE,
        "draft_row_(node + 1)",
        "draft_row_(std::max(node, 0))",
        (tree("stratified[cpu-(-1, 0)-with replacement]"), tree("chi_square[with-cpu]")),
    ),
    Mutant(
        "tree: target row of the node before the parent",
        TREE,
        "row_(make_row(job.target_logits, b, node + 1))",
        "row_(make_row(job.target_logits, b, std::max(node, 0)))",
        (tree("stratified[cpu-(-1, 0)-with replacement]"), tree("chi_square[without-cpu]")),
    ),
    Mutant(
        "tree: draft not renormalised without replacement",
        TREE,
        "      draft_mass_ = -1;",
        "",
        (
            tree("stratified[cpu-(-1, -1)-without replacement]"),
            tree("chi_square[without-cpu]"),
            tree("without_replacement_by_hand[cpu]"),
        ),
    ),
    Mutant(
        "tree: every rejection takes the draft off the first target",
        TREE,
        "taken_ += mass_ / draft_mass_;",
        "taken_ += 1 / draft_mass_;",
        (
            tree("chi_square[with-cpu]"),
            tree("replay_many_siblings[cpu-dense-with]"),
        ),
    ),
    Mutant(
        "tree: children of any node on the path are tried",
        TREE,
        "parent(node) != at ||",
        "parent(node) > at ||",
        (tree("replay[cpu-1000]"), tree("chi_square[with-cpu]")),
    ),
    Mutant(
        "draft noise used again for the verification",
        "python/exactspec/generate.py",
        "cycle = _verify(",
        "num_drafts = draft.draft_tokens.size\n"
        "            if num_drafts:\n"
        "                verify_key = mx.random.split(draft_key, num_drafts)[0]\n"
        "            cycle = _verify(",
        ("tests/test_generate.py::test_joint_distribution_of_consecutive_tokens[opposite model]",),
    ),
    Mutant(
        "head: hidden states of the tokens before",
        "python/exactspec/cached_model.py",
        "self._receive(hidden[: hidden.shape[0] - num_rejected])",
        "self._receive(hidden[num_rejected:])",
        (mtp(ROWS),),
    ),
    Mutant(
        "head: the drafts' entries taken for the text's",
        DRAFTERS,
        "trim_prompt_cache(self._cache, self._num_drafted)",
        "trim_prompt_cache(self._cache, max(self._num_drafted - num_accepted, 0))",
        (mtp(ROWS), mtp("entries_hold_the_text_whatever_is_asked")),
    ),
    Mutant(
        "head: a hidden state beside its own token",
        DRAFTERS,
        "first = self._num_entries + 1",
        "first = self._num_entries",
        (mtp(ROWS), mtp("a_head_that_knows_the_target_is_always_right[token-all ids]")),
    ),
    Mutant(
        "head: the text's last output before every draft",
        DRAFTERS,
        "output = self._outputs(token, output)\n"
        "                self._num_drafted += 1\n"
        "            row = self._row(output)",
        "self._num_drafted += 1\n"
        "                row = self._row(self._outputs(token, output))\n"
        "            else:\n"
        "                row = self._row(output)",
        (mtp(ROWS), mtp("a_head_that_knows_the_target_is_always_right[block-all ids]")),
    ),
    Mutant(
        "head: columns in another order than their ids",
        DRAFTERS,
        "row[vocab.order]",
        "row",
        (mtp(ROWS), mtp("a_head_that_knows_the_target_is_always_right[token-some ids]")),
    ),
    Mutant(
        "head: shared noise by column",
        DRAFTERS,
        "full[self.ids] = row[self.order]",
        "full[: row.size] = row",
        (mtp("a_head_that_knows_the_target_is_always_right[coupled-some ids]"),),
    ),
    Mutant(
        "head: drafts drawn from another distribution than is handed over",
        DRAFTERS,
        "draft_vocab[token])",
        "mx.roll(draft_vocab, 1)[token])",
        (mtp("joint_distribution_of_consecutive_tokens[some ids-3000]"),),
    ),
]
