import { type ReactNode, useEffect, useRef, useState } from "react";
import { get } from "../../api/client";
import { useQuery } from "../../api/query";
import { announce } from "../../ui/announcer";
import { Pending } from "../../ui/basics";
import { type Algorithm, chainOf, withChain } from "./body";
import { algorithmsIn, choices, optionsOf, withAdded, withMoved, withoutDefaults } from "./chain";
import { type Props, Scoped } from "./fields";
import type { Schema } from "./schema";
import { firstLine, plain, SchemaForm } from "./schema-form";

/** The algorithms of the job, in the order in which they run. `recommended`: those it has if it names none. */
export function ChainFields({ recommended, ...props }: Props & { recommended: Algorithm[] }) {
  const isChosen = !!props.body.goal;
  const schema = useQuery(isChosen ? null : "config-schema", (signal) => get<Schema>("/v1/config-schema", {}, signal));
  return (
    <fieldset>
      <legend>Algorithms</legend>
      {isChosen ? (
        <p className="hint">The goal chooses the algorithms.</p>
      ) : schema.data ? (
        <Chain {...props} recommended={recommended} root={schema.data} />
      ) : (
        <Pending query={schema} />
      )}
    </fieldset>
  );
}

/** What gets the focus: the button that moved an algorithm, or, without its name, the list of those to add. */
type Focused = { name?: string; step?: -1 | 1 };

function Chain({ recommended, root, ...props }: Props & { recommended: Algorithm[]; root: Schema }) {
  const { body, onChange, errorAt } = props;
  const own = chainOf(body);
  const chain = own ?? withoutDefaults(recommended, root);
  const list = useRef<HTMLDivElement>(null);
  const [focused, setFocused] = useState<Focused>(); // a new object each time, so that its effect never misses one
  useEffect(() => {
    if (!focused) return;
    const { name, step } = focused;
    // at an end of the chain, the button of that direction is disabled: the other one of the same algorithm is not
    const buttons = [...(list.current?.querySelectorAll<HTMLElement>("[data-moves]") ?? [])];
    const usable = buttons.filter((each) => !each.matches(":disabled") && each.dataset.moves?.startsWith(`${name} `));
    const target = usable.find((each) => each.dataset.moves === `${name} ${step}`) ?? usable[0];
    (target ?? list.current?.querySelector<HTMLElement>("select.adds"))?.focus();
  }, [focused]);
  const change = (next: Algorithm[]) => onChange(withChain(body, next));
  const move = (index: number, step: -1 | 1) => {
    const next = withMoved(chain, index, step);
    change(next);
    const name = chain[index]?.name ?? "";
    setFocused({ name, step });
    announce(`${name} is number ${index + step + 1} of ${next.length}.`);
  };
  const remove = (index: number) => {
    change(chain.filter((_, place) => place !== index));
    setFocused({});
    announce(`${chain[index]?.name} was removed.`);
  };
  const error = errorAt("/config/algo_config");
  return (
    <div ref={list}>
      <p className="hint">
        {own ? "They run in this order." : "Recommended for the scheme and the effort. They run in this order."}
        {body.mix && body.effort && !own && ` Effort ${body.effort} chooses them.`}
      </p>
      {error && <p className="error">✕ {error}</p>}
      <ol className="chain">
        {chain.map((algorithm, index) => (
          <li key={keyOf(chain, index)}>
            <div className="row spread">
              <strong>{algorithm.name}</strong>
              <span className="row">
                <button
                  type="button"
                  className="small"
                  data-moves={`${algorithm.name} -1`}
                  aria-label={`Move ${algorithm.name} up`}
                  disabled={index === 0}
                  onClick={() => move(index, -1)}
                >
                  ↑
                </button>
                <button
                  type="button"
                  className="small"
                  data-moves={`${algorithm.name} 1`}
                  aria-label={`Move ${algorithm.name} down`}
                  disabled={index === chain.length - 1}
                  onClick={() => move(index, 1)}
                >
                  ↓
                </button>
                <button
                  type="button"
                  className="small"
                  aria-label={`Remove ${algorithm.name}`}
                  onClick={() => remove(index)}
                >
                  ✕
                </button>
              </span>
            </div>
            <Options
              algorithm={algorithm}
              pointer={`/config/algo_config/${index}`}
              root={root}
              errorAt={errorAt}
              onChange={(changed) => change(chain.map((each, place) => (place === index ? changed : each)))}
            />
          </li>
        ))}
      </ol>
      {!chain.length && <p>None: the weights are rounded to nearest.</p>}
      <div className="row">
        <select
          className="adds"
          aria-label="Add an algorithm"
          value=""
          onChange={({ target: { value } }) => value && change(withAdded(chain, value, root))}
        >
          <option value="">Add an algorithm…</option>
          {choices(chain, root).map((name) => (
            <option key={name} value={name}>
              {name}
            </option>
          ))}
        </select>
        {own && (
          <button type="button" className="small" onClick={() => onChange(withChain(body, undefined))}>
            Use the recommended algorithms
          </button>
        )}
      </div>
    </div>
  );
}

/** The options of one algorithm, each with its help text. Those without one, for files of other tools, come folded. */
function Options({
  algorithm,
  pointer,
  root,
  errorAt,
  onChange,
}: {
  algorithm: Algorithm;
  pointer: string;
  root: Schema;
  errorAt: Props["errorAt"];
  onChange: (changed: Algorithm) => void;
}) {
  const { usual, others } = optionsOf(algorithm.name, root);
  const error = errorAt(pointer);
  const isSet = ([option]: [string, Schema]) => option in algorithm;
  const fieldOf = ([option, schema]: [string, Schema]) => (
    <SchemaForm
      key={option}
      name={option}
      label={<Scoped to={algorithm.name}>{option}</Scoped>}
      hint={plain(schema.description)}
      pointer={`${pointer}/${option}`}
      schema={schema}
      root={root}
      value={algorithm[option]}
      errorAt={errorAt}
      onChange={(value) => {
        const { [option]: _, ...rest } = algorithm;
        onChange(value === undefined ? (rest as Algorithm) : { ...algorithm, [option]: value });
      }}
    />
  );
  return (
    <>
      <p className="hint">{firstLine(algorithmsIn(root)[algorithm.name]?.description)}</p>
      {error && <p className="error">✕ {error}</p>}
      {usual.length > 0 && (
        <Fold isOpenAtFirst={usual.some(isSet)} text="Options" of={algorithm.name}>
          {usual.map(fieldOf)}
        </Fold>
      )}
      {others.length > 0 && (
        <Fold isOpenAtFirst={others.some(isSet)} text="Options for files of other tools" of={algorithm.name}>
          {others.map(fieldOf)}
        </Fold>
      )}
    </>
  );
}

function Fold({
  isOpenAtFirst,
  text,
  of,
  children,
}: {
  isOpenAtFirst: boolean;
  text: string;
  of: string;
  children: ReactNode;
}) {
  const [isOpen, setIsOpen] = useState(isOpenAtFirst);
  return (
    <details open={isOpen} onToggle={(event) => setIsOpen(event.currentTarget.open)}>
      <summary>
        {text}
        <span className="hidden"> of {of}</span>
      </summary>
      <div className="fields">{children}</div>
    </details>
  );
}

/** The name of the algorithm at `index`, with its number among those of the same name. */
function keyOf(chain: Algorithm[], index: number) {
  const name = chain[index]?.name;
  return `${name} ${chain.slice(0, index).filter((each) => each.name === name).length}`;
}
