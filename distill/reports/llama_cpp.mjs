// What llama.cpp makes of a GGUF file: tokens of texts, greedy continuations, distributions. Reads one JSON object from
// standard input and prints one:
//   {"model": path, "texts": [text], "greedy": {"prompts": [[id]], "count": n}, "sequences": [[id]], "top": k,
//    "reference": path, "positions": [[place]], "threads": n}
//   {"tokens": [[id]], "greedy": [[id]], "seconds": [s], "top": [[[[id, log p]]]], "kl": [[nats]]}
// "top" holds, for each position of each sequence, the k likeliest next tokens; "kl" the divergence from "reference", a
// file of log-probabilities, float32 [all of "positions", vocabulary], at the "positions" of each sequence; "seconds" is
// the time of each continuation's tokens after the first.
import {readFile} from "node:fs/promises";
import {getLlama, LlamaLogLevel} from "node-llama-cpp";

const asked = JSON.parse(await new Response(process.stdin).text());
const llama = await getLlama({gpu: false, build: "never", logLevel: LlamaLogLevel.error});
const model = await llama.loadModel({modelPath: asked.model});
const result = {tokens: (asked.texts ?? []).map((text) => model.tokenize(text, true)), greedy: [], seconds: [], top: [], kl: []};
const greedy = asked.greedy ?? {prompts: [], count: 0};
if (greedy.prompts.length + (asked.sequences ?? []).length > 0) {
    const longest = Math.max(1024, ...(asked.sequences ?? []).map((ids) => ids.length + 1));
    const context = await model.createContext({contextSize: longest, threads: asked.threads ?? 2});
    const sequence = context.getSequence();
    for (const prompt of greedy.prompts) {
        await sequence.clearHistory();
        const made = [];
        let begun = 0;
        for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
            made.push(token);
            if (made.length === 1) begun = performance.now();
            if (made.length >= greedy.count || model.isEogToken(token)) break;
        }
        result.greedy.push(made);
        result.seconds.push((performance.now() - begun) / 1000);
    }
    const reference = asked.reference ? new Float32Array((await readFile(asked.reference)).buffer) : null;
    const columns = reference ? reference.length / asked.positions.reduce((total, places) => total + places.length, 0) : 0;
    let position = 0;
    for (const [number, ids] of (asked.sequences ?? []).entries()) {
        await sequence.clearHistory();
        const places = asked.positions ? new Set(asked.positions[number]) : null;
        const input = ids.map((id, place) => places && !places.has(place) ? id : [id, {generateNext: {probabilities: true, options: {temperature: 1, topK: 0, topP: 1, minP: 0}}}]);
        const outputs = (await sequence.controlledEvaluate(input)).filter((output) => output?.next);
        if (reference) {
            result.kl.push(outputs.map(({next}) => {
                const own = reference.subarray(columns * position++, columns * position);
                let total = 0;
                for (const [id, q] of next.probabilities) {
                    if (id < columns) total += Math.exp(own[id]) * (own[id] - Math.log(q));
                }
                return total;
            }));
        }
        result.top.push(outputs.map(({next}) =>
            [...next.probabilities.entries()].slice(0, asked.top ?? 0).map(([id, p]) => [id, Math.log(p)])));
    }
}
// a pipe takes it in parts: to exit at once would cut it off
process.stdout.write(JSON.stringify(result), () => process.exit(0));
